"""The owner of one episode: the only one that appends to its log.

    mail, control ──┐                    (control first, and heard while data waits for its append)
    handlers ───────┼──▶ commit ──▶ save (one append in flight, the rest joins the next) ──▶ accept ──┬─▶ inboxes ─▶ handlers
    tool calls ─────┘                                                                                └─▶ tool calls

Effects follow their append: a tool starts once `tool.called` is in the log. Taking over is reading the log: what has no
`delivery.handled` is handled again over its own record, and calls without an answer are made again under the same id.

While the episode is paused no handler and no tool call starts; what runs ends and is recorded. Its time limit and its
deadline stand still, because a pause is a person's doing; its worker's slot stays taken. It stays paused over a takeover.
A breakpoint is a pause in the append that holds the event; a step lets one handler or tool call start in a pause.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import TypeVar

import anyio
from anyio.abc import TaskGroup

from aworld_runtime import telemetry
from aworld_runtime.bus.base import (
    Bus,
    Delivery,
    Mail,
    Mailbox,
    Readable,
    due_within,
    read_own,
    read_shared,
)
from aworld_runtime.bus.room import when_there_is_room
from aworld_runtime.errors import EventError, Fenced
from aworld_runtime.events import (
    DeliveryDeadLettered,
    DeliveryHandled,
    EpisodeCancelled,
    EpisodeClaimed,
    EpisodeFinished,
    EpisodePaused,
    EpisodeRequested,
    EpisodeTakenOver,
    Event,
    EventData,
    HumanAnswered,
    HumanAsked,
    LogRestored,
    RecordDropped,
    StopReason,
    SubscriptionChanged,
    ToolCalled,
    ToolFailed,
    ToolReturned,
    utc_now,
)
from aworld_runtime.forks import NOT_FORKED, Origin
from aworld_runtime.names import episode_log, tool_queue
from aworld_runtime.nodes.claim import Claim
from aworld_runtime.nodes.context import Connect, Context
from aworld_runtime.nodes.history import History
from aworld_runtime.nodes.journal import Journal
from aworld_runtime.nodes.node import Node, Program
from aworld_runtime.nodes.pause import Pause, paused_s
from aworld_runtime.nodes.reception import Reception
from aworld_runtime.nodes.recovery import (
    MOST_DEATHS,
    deaths,
    expect_no_end,
    is_unclaimed_fork,
    unfinished,
)
from aworld_runtime.nodes.routing import receivers
from aworld_runtime.nodes.tool_calls import Calls, answer_call, answer_event, closing
from aworld_runtime.tools.base import RemoteTool
from aworld_runtime.tools.call import cut, is_cancelled, told

logger = logging.getLogger(__name__)

HELD_BACK_S = 1.0
"""Where so many have died in one that isn't given up, the next owner listens so long before it starts anything: whoever
wants to cancel it is heard.
"""

T = TypeVar("T")


@dataclass
class Inbox:
    """What one role still has to handle."""

    node: Node
    waiting: deque[Event] = field(default_factory=deque[Event])
    busy: bool = False


@dataclass
class Commit:
    """Events, and mail to acknowledge, that wait for their append."""

    events: Sequence[Event]
    acks: Sequence[Mail]
    saved: anyio.Event = field(default_factory=anyio.Event)
    error: EventError | None = None


class EpisodeOwner:
    """Runs one episode to its end, in stretches.

    `work` goes on until nothing is left to do but to wait: for a person's answer, or for the end of a pause. Meanwhile an owner
    keeps no task, so that very many may wait; `rest` has it called back.

    `connect` gives the model that a spec or an agent's client stands for; `delivery` is the claim, None where nobody
    else can have it; from `logs`, the bus if it isn't given, comes what a fork shares with its parent.
    """

    def __init__(
        self,
        *,
        bus: Bus,
        requested: Event,
        program: Program,
        worker: str,
        connect: Connect,
        delivery: Delivery | None = None,
        logs: Readable | None = None,
    ) -> None:
        if not isinstance(requested.data, EpisodeRequested) or requested.episode_id is None:
            raise TypeError(f"an episode begins with episode.requested, not {requested.type}")
        self.log = episode_log(requested.episode_id)
        self.events: list[Event] = []
        self._history = History(self.events)
        self.connect = connect
        self._claim = Claim(bus, self.log, requested, delivery)
        self._requested = requested
        self._request = requested.data
        self._bus = bus
        self._logs = logs or bus
        self._origin = NOT_FORKED
        self._worker = worker
        self._tools = program.tools
        self._max_hops = program.max_hops
        self._reception = Reception(requested.episode_id, program.by_role, program.tools)
        self._nodes = program.by_role
        self._inboxes: dict[str, Inbox] = {}
        """Of the roles that have something to handle: of many roles, most of them wait most of the time."""
        self._subscribed = program.subscribed
        self._subscriptions: Mapping[str, tuple[str, ...]] = program.subscribed.subscriptions
        self._journals: dict[tuple[str, str], list[Event]] = {}
        self._calls = Calls()
        self._questions: set[str] = set()
        self._mail: Mailbox | None = None
        self._commits: list[Commit] = []
        self._saving = False
        self._running = 0
        self._pause = Pause()
        self._held_back_until = 0.0
        self._finished = False
        self._tasks: TaskGroup | None = None
        """Of the stretch of work under way; None at rest."""
        self._listening: anyio.CancelScope | None = None
        self._to_do: tuple[Callable[[], Awaitable[None]], ...] = ()
        """What is to be begun, now or with the next stretch."""
        self._wake_up: Callable[[], None] | None = None

    async def run(self) -> EpisodeFinished:
        """Own the episode until it is finished, in this task; raises as `work` does."""
        try:
            while (finished := await self.work()) is None:
                woken = anyio.Event()
                self.rest(woken.set)
                await woken.wait()
        finally:
            self.close()
        return finished

    async def work(self, *, refusal: str | None = None) -> EpisodeFinished | None:
        """Own the episode until it is finished, and return its last event's data; or until it waits, and return None.

        `refusal` says why the episode can't run here: it is claimed only to end it with this reason.

        Raises:
            Fenced: another worker took it over, or will (perhaps in an exception group).
        """
        self._mail = self._mail or self._bus.mailbox(self.log)
        try:
            async with anyio.create_task_group() as self._tasks:
                if not self.events:
                    await self._begin()
                if not self._finished:
                    if refusal is not None:
                        self._spawn(self._finish, "failed", refusal)
                    await self._listen(self._mail)
        finally:
            self._tasks = None
        if not self._finished:
            return None
        finished = self.events[-1].data
        if not isinstance(finished, EpisodeFinished):
            raise TypeError(f"{self.log} ended with {self.events[-1].type}")
        return finished

    def rest(self, wake: Callable[[], None]) -> None:
        """Between two stretches of work: have `wake` called once when there may be something to do."""
        if self._mail is None:
            raise RuntimeError(f"{self.log} has not been worked on")
        self._history.forget()
        self._wake_up = wake
        if self._to_do:
            self._rouse()
        else:
            self._mail.call_when_mail(self._rouse)

    def close(self) -> None:
        """Own the episode no longer."""
        self._wake_up = None
        self._pause.call_off()
        if self._mail is not None:
            self._mail.close()

    def look(self) -> None:
        """See whether the log and the claim are still there, for the server is another than before. What is waiting for
        a human, or for anything, would else not notice for as long as it waits.
        """
        if self.events and not self._finished:
            self._do(self._look)

    async def _look(self) -> None:
        if not await self._claim.put_back(self.events):
            await self._claim.check()

    def _do(self, work: Callable[[], Awaitable[None]]) -> None:
        """Now, or in a stretch of work that begins for it. May be called outside of any task, where none can be started."""
        self._to_do = (*self._to_do, work)
        if self._listening is not None:
            self._listening.cancel()
        else:
            self._rouse()

    def _rouse(self) -> None:
        wake_up, self._wake_up = self._wake_up, None
        if wake_up is not None:
            wake_up()

    async def commit(self, events: Sequence[Event], *, acks: Sequence[Mail] = ()) -> None:
        """Append events and act on them. Who is cancelled while it waits has committed all the same.

        Control mail goes into the next append before what waits for it.

        Raises:
            EventError: an event that is too large, or that no log can hold; none of these is appended.
        """
        if not self._finished:
            if not events and not acks:
                return
            commit = Commit(events, acks)
            urgent = any(mail.lane == "control" for mail in acks)
            self._commits.insert(0 if urgent else len(self._commits), commit)
            if not self._saving:
                self._saving = True
                self._group.start_soon(self._save)
            await commit.saved.wait()
            if commit.error is not None:
                raise commit.error
        if self._finished:  # whoever gets here is about to be cancelled
            await anyio.sleep_forever()

    async def _save(self) -> None:
        """Append what waits, until nothing does. A task of its own, so that no handler's fate is another's."""
        while self._commits and not self._finished:
            commits, self._commits = self._commits, []
            try:
                await self._append(commits)
            except EventError:
                for commit in commits:
                    await self._append_alone(commit)
            for commit in commits:
                commit.saved.set()
        self._saving = False
        await self._rest_or_end()

    async def _append_alone(self, commit: Commit) -> None:
        """Find the one that no log can hold among several."""
        try:
            await self._append([commit])
        except EventError as error:
            commit.error = error

    async def _append(self, commits: Sequence[Commit]) -> None:
        if self._finished:
            return
        events = [event for commit in commits for event in commit.events]
        settled = self._calls.settled(events, self._worker)
        last = self.events[-1].seq
        if (at := self._pause.breaks(settled, last + 1)) is not None:
            place, paused = at
            settled.insert(place, self._event(paused))
        # Numbered here: on `memory://` the log and this owner then share them.
        batch = [event.kept_at(seq) for seq, event in enumerate(settled, last + 1)]
        acks = [mail for commit in commits for mail in commit.acks]
        append = partial(self._bus.append, self.log, last, batch, acks=acks)
        try:
            await self._send(append)
        except Fenced:
            if not await self._claim.put_back(self.events):
                raise
            await self._send(append)
        for event in batch:
            self._accept(event)

    async def _send(self, send: Callable[[], Awaitable[T]]) -> T:
        return await when_there_is_room(send, who=self.log)

    def _end(self) -> None:
        """The log has its last event: whatever still goes on here is for nothing."""
        self._finished = True
        self._group.cancel_scope.cancel()

    @property
    def _group(self) -> TaskGroup:
        if self._tasks is None:
            raise RuntimeError(f"nobody works on {self.log} now")
        return self._tasks

    # --- claim and recovery ----------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        """Become the owner: begin the log, or take it over and rebuild what was going on.

        A fork is claimed before it is known what it shares with its parent: that may be much.
        """
        while True:
            past = await read_own(self._bus, self.log)
            if past and isinstance(past[-1].data, EpisodeFinished):
                self.events = past
                self._end()
                return
            expect_no_end(self.log, past)
            last = past[-1].seq if past else 0
            # Before an empty log is begun: what was seen of it, and of the claim, is of this feed.
            feed_id = None if past else await self._claim.expect()
            opening = [e.kept_at(seq) for seq, e in enumerate(self._opening(past), last + 1)]
            append = partial(self._bus.append, self.log, last, opening, feed_id=feed_id)
            try:
                await self._send(append)
            except Fenced:
                if not await self._claim.put_back(past) and self._claim.lost:
                    raise
                continue  # the former owner appended since we read, for the last time
            break
        telemetry.TAKEOVERS.add(any(isinstance(e.data, EpisodeTakenOver) for e in opening))
        await self._recover([*past, *opening])

    def _opening(self, past: Sequence[Event]) -> list[Event]:
        """What an owner begins with."""
        last = past[-1].seq if past else 0
        lost = [self._event(LogRestored(at=last))] if self._request.after_loss else []
        if past and not is_unclaimed_fork(past):
            logger.info("%s is taken over after its event %d", self.log, last)
            taken_over = self._event(EpisodeTakenOver(worker=self._worker))
            return [*lost, taken_over, *self._after_deaths(past)]
        begin = [] if past else [self._requested]
        claimed = self._event(EpisodeClaimed(worker=self._worker))
        return [*begin, *lost, claimed, self._event(self._subscribed)]

    def _after_deaths(self, past: Sequence[Event]) -> list[Event]:
        """The end of an episode that its owners do not survive; nothing for any other.

        Only of a group's, which can do without: others may wait for a human, or anything, through many restarts. They
        are held back.
        """
        died = deaths(past)
        if died < MOST_DEATHS:
            return []
        if self._requested.group_id is None:
            self._held_back_until = anyio.current_time() + HELD_BACK_S
            return []
        answers = {e.correlation_id for e in past if isinstance(e.data, ToolReturned | ToolFailed)}
        why = f"{died} workers died in it, one after another, and none got any further"
        return [*closing(past, answers, self._worker), self._ended("failed", why)]

    async def _recover(self, events: Sequence[Event]) -> None:
        """Go on where the log has come to: `events`, and what it shares with its parent."""
        if isinstance(events[-1].data, EpisodeFinished):
            telemetry.EPISODES_FINISHED.add(1, events[-1].data.reason)
            self.events = [*events]
            self._end()
            return
        try:
            events = [*await read_shared(self._logs, events[0]), *events]
        except EventError as error:
            self.events = [*events]
            self._spawn(self._finish, "failed", f"{type(error).__name__}: {error}")
            return
        self._origin = origin = Origin.of(events)
        past = unfinished(events, origin, self._nodes, self._subscriptions)
        self.events.extend(events)
        for event in events:
            self._note(event)
        self._journals = past.records
        for event, role in past.deliveries:
            self._deliver(event, role)
            self._wake(role)
        self._calls.open = {call: origin.own(event) for call, event in self._calls.open.items()}
        for event in self._calls.open.values():
            if (event.role, event.causation_id) not in self._journals:
                self._spawn(self._run_tool, event)
        for event in events[origin.at :]:
            if isinstance(event.data, EpisodeCancelled):
                self._spawn(self._finish, "cancelled", event.data.reason)
        self._spawn(anyio.sleep, 0)  # where nothing was left to do, this finds out
        self._watch_clock()

    # --- after an append -------------------------------------------------------------------------------------------

    def _accept(self, event: Event) -> None:
        self.events.append(event)
        self._note(event)
        if self._finished:
            return
        if isinstance(event.data, ToolCalled):
            self._spawn(self._run_tool, event)
        if isinstance(event.data, DeliveryHandled):
            self._let_go(event)
        for role in self._receivers(event):
            self._deliver(event, role)
            self._wake(role)

    def _let_go(self, handled: Event) -> None:
        """What a handler had recorded, and has repeated as it ran again, takes effect: sooner it might have been refused."""
        for event in self._journals.pop((handled.role, handled.causation_id or ""), ()):
            if isinstance(event.data, ToolCalled):
                self._spawn(self._run_tool, event)
            if event.seq <= self._origin.at:
                for role in self._receivers(event):
                    self._deliver(event, role)
                    self._wake(role)

    def _note(self, event: Event) -> None:
        self._calls.note(event)
        self._pause.note(event)
        match event.data:
            case HumanAsked():
                self._questions.add(event.id)
            case HumanAnswered():
                self._questions.discard(event.correlation_id or "")
            case SubscriptionChanged(subscriptions=subscriptions):
                self._subscriptions = subscriptions
            case RecordDropped(seqs=seqs):
                record = self._journals.get((event.role, event.causation_id or ""), [])
                record[:] = [each for each in record if each.seq not in seqs]
                self._questions -= {self.events[seq - 1].id for seq in seqs}
            case EpisodeFinished(reason=reason):
                self._end()
                telemetry.EPISODES_FINISHED.add(1, reason)
            case _:
                pass

    def _receivers(self, event: Event) -> list[str]:
        return receivers(event, self._nodes, self._subscriptions)

    def _deliver(self, event: Event, role: str) -> None:
        if event.hops <= self._max_hops:
            if role not in self._inboxes:
                self._inboxes[role] = Inbox(self._nodes[role])
            waiting = self._inboxes[role].waiting
            waiting.append(event)
            if len(waiting) > 1 and waiting[-2].seq > event.seq:  # it was held back
                self._inboxes[role].waiting = deque(sorted(waiting, key=attrgetter("seq")))
            return
        why = (
            f"{event.type} (seq {event.seq}) for {role} is the last of {event.hops} events that follow from one another;"
            f" the program allows {self._max_hops}: its roles go round in a circle, or it needs a larger max_hops"
        )
        self._spawn(self._finish, "hop_limit", why)

    def _wake(self, role: str) -> None:
        inbox = self._inboxes.get(role)
        if inbox is not None and not inbox.busy:
            inbox.busy = True
            self._spawn(self._drain, inbox)

    async def _may_start(self) -> None:
        """Wait until handlers and tool calls may."""
        if self._held_back_until:
            await anyio.sleep_until(self._held_back_until)
        await self._pause.may_start()

    def _spawn(self, work: Callable[..., object], *arguments: object) -> None:
        self._running += 1
        self._group.start_soon(self._counted, work, arguments)

    async def _counted(self, work: Callable[..., object], arguments: tuple[object, ...]) -> None:
        await work(*arguments)  # pyright: ignore[reportGeneralTypeIssues]
        self._running -= 1
        await self._rest_or_end()

    @property
    def _in_flight(self) -> bool:
        return bool(self._running) or self._saving

    async def _rest_or_end(self) -> None:
        """Where nothing is in flight any more."""
        if self._in_flight or self._finished:
            return
        if self._questions or self._pause.active:
            if self._listening is not None:
                self._listening.cancel()
        else:
            await self._finish("quiescent", "nothing is in flight, and nobody has answered")

    # --- handlers --------------------------------------------------------------------------------------------------

    async def _drain(self, inbox: Inbox) -> None:
        """Handle a role's deliveries, one at a time, in seq order."""
        while inbox.waiting and not self._finished:
            await self._may_start()
            event = inbox.waiting.popleft()
            await self._handle(inbox.node, event)
        del self._inboxes[inbox.node.role]

    async def _handle(self, node: Node, event: Event) -> None:
        recorded = self._journals.get((node.role, event.id), ())
        ctx = Context(
            role=node.role,
            source=f"{node.role}/{self._worker}",
            event=event,
            history=self._history,
            request=self._request,
            world=self,
            journal=Journal(recorded, edited=self._origin.edited, free=self._origin.at),
        )
        try:
            await node.handle(ctx, ctx.event)
            ctx.journal.check()
            handled = self._event(DeliveryHandled(seq=event.seq), role=node.role, cause=event)
            await self.commit([*ctx.take_unsaved(), handled])
        except anyio.get_cancelled_exc_class() as error:
            if is_cancelled():
                raise
            await self._fail(ctx, ctx.journal.divergence or error)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the boundary: an agent's crash becomes data
            await self._fail(ctx, ctx.journal.divergence or error)

    async def _fail(self, ctx: Context, error: BaseException) -> None:
        """End the episode with a handler's error, after what it still had to say."""
        name, message, event = type(error).__name__, told(error), ctx.event
        logger.warning(
            "%s: %s failed on %s (seq %d): %s: %s",
            self.log,
            ctx.role,
            event.type,
            event.seq,
            name,
            message,
        )
        dead = DeliveryDeadLettered(seq=event.seq, error=name, message=message, attempts=1)
        failed = EpisodeFinished(reason="failed", error=f"{ctx.role}: {name}: {message}")
        end = [self._event(dead, role=ctx.role, cause=event), self._event(failed)]
        try:
            await self.commit([*ctx.take_unsaved(), *end])
        except EventError:  # no log can hold that
            await self.commit(end)

    # --- tools -----------------------------------------------------------------------------------------------------

    async def _run_tool(self, called: Event) -> None:
        if not isinstance(called.data, ToolCalled):
            raise TypeError(f"{called.type} is no tool call")
        if called.id not in self._calls.open:
            return  # it was closed in the append that brought it
        await self._may_start()
        if called.id not in self._calls.open:
            self._pause.give_back()  # it was closed in a pause
            return
        tools = self._tools.get(called.role, {})
        tool = tools.get(called.data.call.name)
        if isinstance(tool, RemoteTool):
            await self._call_remote(tool, called)
        else:
            answer = await answer_call(
                called, tool, source=f"{called.data.call.name}/{self._worker}", known=tools
            )
            await self.commit([answer])

    async def _call_remote(self, tool: RemoteTool, called: Event) -> None:
        """Send the call to the tool's queue; its answer comes by mail."""
        name = tool.get_schema().name
        wanted = due_within(called, tool.timeout_s, self._bus.now())
        await self._send(partial(self._bus.put, tool_queue(name), wanted))
        if not await self._calls.answered(called.id, tool.timeout_s):
            failure = ToolFailed(
                name=name, error="ToolTimeoutError", message=f"no answer in {tool.timeout_s:g} s"
            )
            await self.commit([answer_event(called, failure, source=f"{name}/{self._worker}")])

    # --- mail, deadline, end ---------------------------------------------------------------------------------------

    async def _listen(self, mail: Mailbox) -> None:
        """Receive mail, and begin what is to be done, until nothing is left but to wait."""
        known: set[str] = set()
        while True:
            to_do, self._to_do = self._to_do, ()
            for work in to_do:
                self._spawn(work)
            with anyio.CancelScope() as self._listening:
                await self._receive(mail, known)
            if not (self._in_flight or self._to_do):  # mail may have come in the last moment
                break
        self._listening = None

    async def _receive(self, mail: Mailbox, known: set[str]) -> None:
        """`known` are the ids of events that it has had."""
        async for batch in mail:
            known.update(event.id for event in self.events if not known)
            fresh: list[Event] = []
            acks: list[Mail] = []
            for item in batch:
                event = item.event
                if event.id in known or self._calls.is_late(event):
                    acks.append(item)
                elif (why := self._reception.forged(event, self._calls.asked(event))) is not None:
                    self._spawn(self._refuse, item, why)
                else:
                    acks.append(item)
                    known.add(event.id)
                    fresh.append(self._reception.labeled(event))
            if any(isinstance(event.data, EpisodeCancelled | EpisodePaused) for event in fresh):
                self._pause.begin()  # nothing new starts while it waits for its append
            for event in fresh:
                if isinstance(event.data, EpisodeCancelled):
                    fresh.append(self._ended("cancelled", event.data.reason, cause=event))
                    break
            # Not awaited: what comes next may be a cancellation, and control mail is heard at once.
            self._spawn(partial(self.commit, fresh, acks=acks))

    async def _refuse(self, mail: Mail, why: str) -> None:
        """Forged mail is no part of the episode, and it is known to whoever looks for dead letters."""
        event = mail.event
        logger.warning("%s: mail refused, %s %s: %s", self.log, event.type, event.id, why)
        reason = f"ForgedEventError: {why} (mail to {self.log})"
        await self._send(partial(self._bus.bury_mail, mail, reason))

    def _watch_clock(self) -> None:
        """End the episode at its deadline, or when its time since this claim is up, whichever is first, pauses not counted."""
        limits: list[tuple[float, str]] = []
        if (deadline := self._requested.deadline) is not None:
            left = (deadline - utc_now()).total_seconds() + paused_s(self.events)
            limits.append((left, f"deadline {deadline.isoformat()} has passed"))
        if (timeout_s := self._request.timeout_s) is not None:
            limits.append(
                (timeout_s, f"not done {timeout_s:g} s after worker {self._worker} began")
            )
        if limits:
            left, why = min(limits)
            end = partial(self._finish, "time_limit", why)
            self._pause.call_in(left, partial(self._do, end))

    async def _finish(self, reason: StopReason, error: str) -> None:
        await self.commit([self._ended(reason, error)])

    def _ended(self, reason: StopReason, error: str, *, cause: Event | None = None) -> Event:
        return self._event(EpisodeFinished(reason=reason, error=cut(error)), cause=cause)

    def _event(self, data: EventData, *, role: str = "worker", cause: Event | None = None) -> Event:
        requested = self._requested
        cause = cause or requested
        return Event.of(
            data,
            source=f"{role}/{self._worker}",
            run_id=requested.run_id,
            task_id=requested.task_id,
            group_id=requested.group_id,
            episode_id=requested.episode_id,
            attempt=requested.attempt,
            causation_id=cause.id,
            hops=cause.hops + 1,
            traceparent=requested.traceparent,
        )
