"""Replay: the recorded handlers run again over the record, without a world to touch.

    delivery.handled ──▶ the delivered event, and what its handler recorded ──▶ Journal ──▶ node.handle ──▶ compare
    (log order)

`Rerun` runs one handler, `replay` all of them.
Nothing live can happen: a context without a world has no model, no tool and no clock, and what reaches past it is refused.
The first difference ends it.
Here too is `inspect`, which runs no user code at all.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from typing import cast

import anyio

from aworld_runtime.errors import DivergenceError, LiveCallError, ReplayError
from aworld_runtime.events import (
    DeliveryDeadLettered,
    DeliveryHandled,
    EpisodeFinished,
    EpisodeRequested,
    Event,
    SubscriptionChanged,
)
from aworld_runtime.forks import Origin
from aworld_runtime.messages import Data
from aworld_runtime.nodes.context import Context
from aworld_runtime.nodes.history import History
from aworld_runtime.nodes.journal import LONGEST_S, PATIENCE_S, Journal, journals
from aworld_runtime.nodes.node import Node, Program
from aworld_runtime.nodes.routing import receivers
from aworld_runtime.offline import offline
from aworld_runtime.replay.cause import Cause, cause_of, place, surely_runs, suspects
from aworld_runtime.tools.call import is_cancelled, told
from aworld_runtime.trajectory import Episode, episode_of
from aworld_runtime.version import code_version

RERUNS = 20
"""Of a handler that diverged, to see whether it always does that; what tosses a coin escapes once in a million times."""
RERUNS_S = 2.0
"""After which no other begins."""
SUSPECTS = 3
"""Lines that are named."""
KEEPS_STATE = "the lint finds nothing: perhaps it keeps state of its own, where it may know only what ctx.history says"
REACHES_OUTSIDE = ("network", "model")
"""Rules of the lint."""
GO_THROUGH = "it was refused; use await ctx.complete(model) or await ctx.record(kind, produce), or make it a tool"
OUTCOMES = (DeliveryHandled, DeliveryDeadLettered)
ADDRESS = re.compile(r"\b(?:0x)?[0-9a-f]{8,}\b")
"""Of an object, in an error's message: another one each time."""


class Divergence(Data):
    """The first place where the code did something else than the record."""

    seq: int
    role: str
    type: str
    """Of the event at `seq`."""
    message: str
    cause: Cause
    """The likely one."""
    advice: tuple[str, ...]
    """What differs, and where to look."""
    recorded: str
    replayed: str


class ReplayReport(Data):
    """What a replay found."""

    episode: str
    handlers: int
    """Handler invocations that ran again."""
    events: int
    """Events in the log."""
    live_calls: int = 0
    """What handlers tried to reach past their context: each was refused, and is a difference."""
    finished: bool = True
    """Whether the log has the episode's end."""
    identical: bool
    divergence: Divergence | None = None


def inspect(events: Sequence[Event]) -> Episode:
    """The episode as its log tells it; runs no user code."""
    return episode_of(events)


class Rerun:
    """The recorded handlers of one episode, each of which runs again when it is asked to.

    Raises:
        ReplayError: the log doesn't begin with `episode.requested`.
    """

    def __init__(self, events: Sequence[Event], program: Program) -> None:
        if not events or not isinstance(events[0].data, EpisodeRequested):
            first = events[0].type if events else "nothing"
            raise ReplayError(f"the log begins with {first}; expected episode.requested")
        self.live_calls = 0
        """What handlers tried to reach past their context; each was refused."""
        self._events = events
        self._history = History(events)
        self._program = program
        self._nodes = program.by_role
        self._delivered = {event.seq: event for event in events}
        self._recorded = journals(events)
        self._origin = Origin.of(events)
        self._requests = [(e.seq, e.data) for e in events if isinstance(e.data, EpisodeRequested)]
        self._subscribed = {
            role
            for e in events
            if isinstance(e.data, SubscriptionChanged)
            for role in e.data.subscriptions
        }
        """Roles of the agents that there were."""
        self._handled = self._by_outcome()

    @property
    def outcomes(self) -> Iterator[Event]:
        """How each handler ended, in the log's order; once each, also where a takeover ran it again. Of a handler that the end
        of the log cut off, the last event that it recorded. Of a fork its own: what it shares with its parent, perhaps another
        program did.
        """
        return (event for event in self._events if event.seq in self._handled)

    def _by_outcome(self) -> dict[int, Event]:
        """Seq of each outcome → the event that was handled."""
        found: dict[int, Event] = {}
        ended = {
            (e.role, e.data.seq): False
            for e in self._events[: self._origin.at]
            if isinstance(e.data, OUTCOMES)
        }
        """Whether in this log, and not in its parent's."""
        for event in self._events[self._origin.at :]:
            data = event.data
            if isinstance(data, OUTCOMES) and not ended.get((event.role, data.seq)):
                ended[event.role, data.seq] = True
                if data.seq in self._delivered:
                    found[event.seq] = self._delivered[data.seq]
        ids = {event.id: event for event in self._events}
        for (role, handled), recorded in self._recorded.items():
            delivered, last = ids.get(handled), recorded[-1].seq
            if role not in self._subscribed or delivered is None or last <= self._origin.at:
                continue
            if (role, delivered.seq) not in ended:
                found[last] = delivered
        return found

    async def handler(self, outcome: Event) -> None:
        """Run the handler again that ended with `outcome`, one of `outcomes`.

        Raises:
            DivergenceError: it did something else than its record, or ended in another way; or it tried to reach outside past
                its context.
        """
        delivered = self._handled.get(outcome.seq)
        if delivered is None:
            raise TypeError(f"{outcome.type} (seq {outcome.seq}) ends no handler")
        own = self._origin.own
        recorded = map(own, self._recorded.get((outcome.role, delivered.id), ()))
        ctx = Context(
            role=outcome.role,
            source=outcome.source,
            event=own(delivered),
            history=self._history,
            request=self._request(outcome),
            world=None,
            journal=Journal(
                tuple(recorded),
                edited=self._origin.edited,
                cut=not isinstance(outcome.data, OUTCOMES),
            ),
        )
        repeat, node = _repeat_cut if ctx.journal.cut else _repeat, self._node(outcome)
        with offline() as tried:
            try:
                await repeat(node, ctx, outcome)
            except DivergenceError:
                if not tried:
                    raise
        self.live_calls += len(tried)
        if tried:
            call = tried[0]
            raise DivergenceError(
                f"on seq {delivered.seq}, {outcome.role} tried a live call past its context: {call.what}",
                seq=delivered.seq,
                recorded="(nothing)",
                replayed=call.what,
            ) from call

    def otherwise_delivered(self) -> Divergence | None:
        """The first event that one of the program's roles would have got, and didn't, or the other way round: its subscriptions
        are others than the recorded ones. Where the program lacks a role, `handler` tells.
        """
        own = self._events[self._origin.at :]
        changes = [(e.seq, e.data) for e in own if isinstance(e.data, SubscriptionChanged)]
        now = self._program.subscribed.subscriptions
        then = changes[0][1].subscriptions if changes else now
        if then == now or not then.keys() <= now.keys():
            return None
        until = changes[1][0] if changes[1:] else None
        for event in self._events[self._origin.at : until]:
            got = {*receivers(event, then, then)}
            for role in sorted(got ^ {*receivers(event, now, now)}):
                sides = (f"is delivered to {role}", f"is not delivered to {role}")
                recorded, replayed = sides if role in got else sides[::-1]
                was = ", ".join(then.get(role, ())) or "nothing"
                return Divergence(
                    seq=event.seq,
                    role=role,
                    type=event.type,
                    message=f"at seq {event.seq}, {event.type} {recorded} in the record; this time it {replayed}",
                    cause="changed code",
                    advice=(
                        f"{role} subscribed to {was}, now to {', '.join(now[role]) or 'nothing'}",
                    ),
                    recorded=recorded,
                    replayed=replayed,
                )
        return None

    async def explain(self, outcome: Event, error: DivergenceError) -> Divergence:
        """The likely cause of what `handler` raised. Runs the handler a few times more, to see whether it always does that."""
        if outcome.role in self._nodes:
            cause, advice = await self._cause(outcome, error)
        else:
            cause = "changed code"
            advice = [f"give the program that was recorded: {self._request(outcome).program}"]
        return Divergence(
            seq=error.seq,
            role=outcome.role,
            type=self._delivered[error.seq].type,
            message=str(error),
            cause=cause,
            advice=tuple(advice),
            recorded=error.recorded,
            replayed=error.replayed,
        )

    async def _cause(self, outcome: Event, error: DivergenceError) -> tuple[Cause, list[str]]:
        node = self._nodes[outcome.role]
        lines = suspects(node, self._request(outcome).program)
        if isinstance(error.__cause__, LiveCallError):
            found = [str(line) for line in lines if line.rule in REACHES_OUTSIDE][:SUSPECTS]
            at = [f"it is made at {error.__cause__.place}"] if error.__cause__.place else found
            where = at or [f"the code is {place(type(node))}"]
            return "live call", [*where, GO_THROUGH]
        if await self._varies(outcome, error):
            said = [str(line) for line in lines[:SUSPECTS]] or [KEEPS_STATE]
            return "non-determinism", ["it does something else each time it runs", *said]
        cause, said = "changed code", list[str]()
        if error.events is not None:
            recorded, replayed = cast("tuple[Event, Event]", error.events)
            cause, said = cause_of(recorded, replayed)
        if cause == "changed code":
            said += [self._versions(outcome), f"the code is {place(type(node))}"]
        found = [line for line in lines if surely_runs(line, node)]
        return cause, [*said, *(f"this may be why: {line}" for line in found[:SUSPECTS])]

    def _versions(self, outcome: Event) -> str:
        then, now = self._request(outcome).code_version or "unknown", code_version()
        if then == now:
            return f"this is the version of aworld-rt that recorded it, {now}"
        return f"aworld-rt {then} recorded it, this is {now}"

    async def _varies(self, outcome: Event, first: DivergenceError) -> bool:
        """Whether the handler does something else when it runs again over the same record."""
        until = time.perf_counter() + RERUNS_S
        for _ in range(RERUNS):
            try:
                await self.handler(outcome)
            except DivergenceError as error:
                if (error.seq, error.replayed) != (first.seq, first.replayed):
                    return True
            else:
                return True
            if time.perf_counter() > until:
                break
        return False

    def _request(self, outcome: Event) -> EpisodeRequested:
        """The one in force when the handler ended: a fork has its own, after its parent's."""
        return next(data for seq, data in reversed(self._requests) if seq < outcome.seq)

    def _node(self, outcome: Event) -> Node:
        if outcome.role in self._nodes:
            return self._nodes[outcome.role]
        known = ", ".join(self._nodes) or "none"
        raise DivergenceError(
            f"at seq {outcome.seq}, {outcome.role} is recorded, but the program has no such role; it has: {known}",
            seq=outcome.seq,
            recorded=f"role {outcome.role}",
            replayed=f"roles {known}",
        )


async def replay(events: Sequence[Event], program: Program) -> ReplayReport:
    """Run every recorded handler of an episode again and compare, up to the first difference.

    Raises:
        ReplayError: the log doesn't begin with `episode.requested`.
    """
    rerun = Rerun(events, program)
    handlers = 0
    divergence = rerun.otherwise_delivered()
    for outcome in () if divergence else rerun.outcomes:
        try:
            await rerun.handler(outcome)
        except DivergenceError as error:
            divergence = await rerun.explain(outcome, error)
            break
        handlers += 1
    return ReplayReport(
        episode=events[-1].episode_id or "",
        handlers=handlers,
        events=len(events),
        live_calls=rerun.live_calls,
        finished=isinstance(events[-1].data, EpisodeFinished),
        identical=divergence is None,
        divergence=divergence,
    )


async def _repeat(node: Node, ctx: Context, outcome: Event) -> None:
    """Run one handler over its record.

    Raises:
        DivergenceError: it did something else, or ended in another way.
    """
    took_s = (outcome.time - ctx.event.time).total_seconds()
    limit_s = (
        min(max(took_s, 0), LONGEST_S) + 2 * PATIENCE_S
    )  # its journal knows better what it waits for
    failure: BaseException | None = None
    with anyio.move_on_after(limit_s) as limit:
        failure = await _failure(node, ctx)
    dead = outcome.data if isinstance(outcome.data, DeliveryDeadLettered) else None
    if dead is None or dead.error != "DivergenceError":
        ctx.journal.check()
    failure = ctx.journal.divergence or failure
    recorded = "handled" if dead is None else f"failed with {dead.error}: {dead.message}"
    if limit.cancelled_caught:
        replayed = "never ended"
    elif failure is not None:
        replayed = f"failed with {type(failure).__name__}: {told(failure)}"
    else:
        replayed = "handled"
    if not _same_end(dead, failure) or limit.cancelled_caught:
        raise DivergenceError(
            f"at seq {outcome.seq}, {outcome.role} {recorded}; this time it {replayed}",
            seq=outcome.seq,
            recorded=recorded,
            replayed=replayed,
        )


async def _repeat_cut(node: Node, ctx: Context, _: Event) -> None:
    """Run a handler that had not ended as far as its record goes.

    Raises:
        DivergenceError: it did something else.
    """
    async with anyio.create_task_group() as tasks:

        async def watch() -> None:
            await ctx.journal.all_repeated()
            tasks.cancel_scope.cancel()

        tasks.start_soon(watch)
        await _failure(node, ctx)
        tasks.cancel_scope.cancel()
    ctx.journal.check()


async def _failure(node: Node, ctx: Context) -> BaseException | None:
    """Handle the event; what that fails with."""
    try:
        await node.handle(ctx, ctx.event)
    except anyio.get_cancelled_exc_class() as error:
        if is_cancelled():
            raise
        return error
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the boundary: compared with how it ended then
        return error
    return None


def _same_end(dead: DeliveryDeadLettered | None, failure: BaseException | None) -> bool:
    if dead is None or failure is None:
        return dead is failure
    if dead.error != type(failure).__name__:
        return False
    said = dead.message, told(failure)
    # What strayed from its record tells of ids and times.
    return dead.error == "DivergenceError" or len({ADDRESS.sub("", each) for each in said}) == 1
