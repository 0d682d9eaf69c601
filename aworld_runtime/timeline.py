"""What went on in an episode, by whom and for how long: a fold of its log, for whoever shows it.

    Work        what a role did about one thing that it was asked
    └── Turn    a completion, and what came of it
        ├── Call        of the model, a tool or a person, with the answer
        └── Moment      what else the role said, and what befell it: a takeover, a pause, a word from outside

`Timeline.add` takes the log's next event and gives out the entries that are settled by it: nothing in them changes any
more. What still goes on is in the timeline itself. Each event costs the same however long the log is, and a log without
an end is as good as another. Nothing here knows how it is shown.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeAlias

from aworld_runtime.events import (
    AnswerProposed,
    DeliveryDeadLettered,
    DeliveryHandled,
    EpisodeAnswered,
    EpisodeClaimed,
    EpisodeFinished,
    EpisodeForked,
    EpisodePaused,
    EpisodeRequested,
    EpisodeResumed,
    EpisodeTakenOver,
    Event,
    HandoffMade,
    HumanAnswered,
    HumanAsked,
    MessagePosted,
    ModelCompleted,
    ModelFailed,
    ModelRequested,
    RecordDropped,
    RewardGiven,
    SubscriptionChanged,
    ToolCalled,
    ToolFailed,
    ToolReturned,
    ValueRecorded,
)
from aworld_runtime.nodes.routing import receivers

SILENT = (DeliveryHandled, EpisodeAnswered, SubscriptionChanged, ValueRecorded)
"""Bookkeeping, or said by what follows."""
ASK_NOBODY = (
    *(*SILENT, ModelRequested, ModelCompleted, ModelFailed),
    *(ToolCalled, ToolReturned, ToolFailed),
)
"""What no rule of a swarm turns into a question to a role: not kept, for most of a log is of these types."""


@dataclass(eq=False, slots=True)
class Work:
    """What one role does about one thing it was asked. Answers to its own calls belong to that, they ask nothing new."""

    role: str
    number: int
    """Of the episode's, by when they began."""
    delivered: Event | None
    """What it was asked with; None where that part of the log is missing."""
    origin: str
    """The role that is behind it, past the rules of a swarm; `task` for the episode's own task."""
    handed_over: bool = False


@dataclass(eq=False, slots=True)
class Call:
    """It waits for its answer."""

    asked: Event
    """`model.requested`, `tool.called` or `human.asked`."""
    began: datetime
    """When it was asked; or, where a fork goes on with it, when that was claimed."""
    answer: Event | None = None
    again: int = 0
    """How often it was made again, by a worker that took the episode over, or in a fork. A person is asked once."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that took no time. An entry of its own where no turn was going on."""

    event: Event
    after_s: float = 0.0
    """Of a takeover: how long the log had stood still; of a resumption: the pause."""
    former: str = ""
    """The worker that was lost."""


@dataclass(eq=False, slots=True)
class Turn:
    """A completion and what came of it; or, of code that asked no model, only the latter."""

    work: Work
    number: int = 0
    """Of its role's; 0 without a completion."""
    completion: Call | None = None
    waited_s: float = 0.0
    """From what caused it to its completion's request: its role was busy, or the episode paused or without a worker."""
    said: list[Call | Moment] = field(default_factory=list[Call | Moment])
    """What came of it, and what happened meanwhile, in order."""
    outcome: Event | None = None
    """Where it ends the work: the answer proposed, or the failure."""
    unanswered: int = 0
    """Of its completion and its calls."""
    over: bool = False
    """Its handler will emit no more."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """A worker claimed the episode, or the fork."""

    requested: Event | None
    claimed: Event
    forked: Event | None
    waited_s: float
    """For a worker."""


@dataclass(frozen=True, slots=True)
class End:
    finished: Event
    took_s: float
    """Since the request."""


Entry: TypeAlias = Beginning | Turn | Moment | End


@dataclass(slots=True)
class Totals:
    """Of the episode so far; of a fork with all that it continues."""

    agents: set[str] = field(default_factory=set[str])
    """Roles that asked a model or somebody else, or answered."""
    turns: int = 0
    calls: int = 0
    failed_calls: int = 0
    tokens: int = 0
    cost_usd: float = 0.0
    reward: float | None = None


_Handler: TypeAlias = tuple[str, str]
"""A role, and the id of the event that it handles."""


class Timeline:
    """Takes an episode's log event by event."""

    def __init__(self) -> None:
        self.requested: Event | None = None
        """The request in force."""
        self.worker: str | None = None
        """Who has the episode; None while it waits for a worker."""
        self.open: dict[int, Turn] = {}
        """Turns that are not settled, in the order in which they began."""
        self.pending: dict[_Handler, Event] = {}
        """What a role was given and has not handled."""
        self.paused: Event | None = None
        self.finished: Event | None = None
        self.totals = Totals()
        self.last: datetime | None = None
        """The latest time in the log so far: machines' clocks differ, and mail is older than its place."""
        self._forked: Event | None = None
        self._roles: dict[str, tuple[str, ...]] = {}
        """The program's, and the types that each has subscribed to."""
        self._works: dict[_Handler, Work] = {}
        self._turns: dict[_Handler, Turn] = {}
        self._waiting: dict[str, tuple[Turn, Call]] = {}
        """Calls whose answer has not come, by id."""
        self._causes: dict[str, Event] = {}
        """Events that others may have been asked with, or because of."""
        self._numbers: dict[str, int] = {}
        self._began = 0

    def add(self, event: Event) -> list[Entry]:
        """Take the log's next event; returns what it settles, in order."""
        silence_s = _seconds(self.last, event.time)
        self.last = max(self.last or event.time, event.time)
        if not isinstance(event.data, ASK_NOBODY):
            self._causes[event.id] = event
        entries = self._take(event, silence_s)
        self._deliver(event)
        return entries

    def _take(self, event: Event, silence_s: float) -> list[Entry]:
        entries: list[Entry] = []
        match event.data:
            case EpisodeForked() | EpisodeRequested() | EpisodeClaimed():
                entries = self._begin(event)
            case EpisodeTakenOver(worker=worker):
                entries = self._meanwhile(Moment(event, silence_s, self.worker or ""))
                self.worker = worker
                self._ask_again()
            case EpisodePaused() | EpisodeResumed():
                entries = self._pause(event)
            case EpisodeFinished():
                entries = self._end(event)
            case ModelCompleted() | ModelFailed() | ToolReturned() | ToolFailed() | HumanAnswered():
                entries = self._answered(event)
            case ModelRequested() | ToolCalled() | HumanAsked() | AnswerProposed():
                entries = self._act(event)
            case DeliveryHandled() | DeliveryDeadLettered():
                entries = self._handled(event)
            case SubscriptionChanged(subscriptions=subscriptions):
                first, self._roles = not self._roles, subscriptions
                if first and self.requested is not None:
                    self._deliver(self.requested)  # which came before the roles were known
            case RewardGiven(role=None, reward=reward):
                self.totals.reward = reward
            case RecordDropped(seqs=seqs):
                entries = [*self._drop(seqs), *self._remark(event)]
            case _:
                entries = self._remark(event)
        return entries

    # --- the episode -----------------------------------------------------------------------------------------------

    def _begin(self, event: Event) -> list[Entry]:
        match event.data:
            case EpisodeForked():
                self._forked = event
                self.worker = self.finished = None
                return []
            case EpisodeRequested():
                self.requested = event
                return []
            case EpisodeClaimed(worker=worker):
                self.worker = worker
                if self._forked is not None:
                    self._ask_again(since=event.time)
                waited_s = _seconds(self.requested and self.requested.time, event.time)
                return [Beginning(self.requested, event, self._forked, waited_s)]
            case _:
                return []

    def _ask_again(self, *, since: datetime | None = None) -> None:
        """What the former owner left without an answer is asked again, under the same ids. A person isn't."""
        for _, call in self._waiting.values():
            call.began = since or call.began
            call.again += not isinstance(call.asked.data, HumanAsked)

    def _drop(self, seqs: Container[int]) -> list[Entry]:
        """What a fork's handler took back gets no answer any more."""
        entries: list[Entry] = []
        for turn, call in list(self._waiting.values()):
            if call.asked.seq in seqs:
                del self._waiting[call.asked.id]
                turn.unanswered -= 1
                entries += self._settle(turn)
        return entries

    def _pause(self, event: Event) -> list[Entry]:
        """To pause twice is to pause once."""
        before = self.paused
        if isinstance(event.data, EpisodePaused):
            self.paused = before or event
            return [] if before else self._meanwhile(Moment(event))
        self.paused = None
        return self._meanwhile(Moment(event, _seconds(before.time, event.time))) if before else []

    def _meanwhile(self, moment: Moment) -> list[Entry]:
        """Of the turn that goes on, the one that began last; an entry where none does."""
        if not self.open:
            return [moment]
        next(reversed(self.open.values())).said.append(moment)
        return []

    def _end(self, event: Event) -> list[Entry]:
        self.finished = event
        unsettled = list(self.open.values())
        for going_on in (self.open, self.pending, self._turns, self._waiting):
            going_on.clear()
        took_s = _seconds(self.requested and self.requested.time, event.time)
        return [*unsettled, End(event, took_s)]

    # --- what roles do ---------------------------------------------------------------------------------------------

    def _act(self, event: Event) -> list[Entry]:
        self.totals.agents.add(event.role)
        match event.data:
            case ModelRequested():
                return self._ask_model(event)
            case AnswerProposed():
                self._turn(event).outcome = event
            case _:
                turn = self._turn(event)
                turn.said.append(self._call(turn, event))
                self.totals.calls += isinstance(event.data, ToolCalled)
        return []

    def _ask_model(self, event: Event) -> list[Entry]:
        handler = (event.role, event.causation_id or "")
        before = self._turns.pop(handler, None)
        entries = [] if before is None else self._over(before)
        turn, delivered = self._turn(event), self.pending.get(handler)
        turn.completion = self._call(turn, event)
        if delivered is not None and self.requested is not None:  # which in a fork may be later
            turn.waited_s = _seconds(max(delivered.time, self.requested.time), event.time)
        turn.number = self._numbers[event.role] = self._numbers.get(event.role, 0) + 1
        self.totals.turns += 1
        return entries

    def _call(self, turn: Turn, event: Event) -> Call:
        call = Call(event, event.time)
        self._waiting[event.id] = turn, call
        turn.unanswered += 1
        return call

    def _answered(self, event: Event) -> list[Entry]:
        turn, call = self._waiting.pop(event.correlation_id or "", (None, None))
        if turn is None or call is None:
            return []
        turn.unanswered -= 1
        call.answer = event
        self._works[turn.work.role, event.id] = turn.work
        if isinstance(event.data, ToolFailed):
            self.totals.failed_calls += 1
        if isinstance(event.data, ModelCompleted):
            usage = event.data.usage
            self.totals.tokens += usage.prompt_tokens + usage.completion_tokens
            self.totals.cost_usd += usage.cost_usd
        return self._settle(turn)

    def _handled(self, event: Event) -> list[Entry]:
        handler = (event.role, event.causation_id or "")
        if isinstance(event.data, DeliveryDeadLettered):
            self._turn(event).outcome = event
        delivered = self.pending.pop(handler, None)
        turn = self._turns.pop(handler, None)
        self._works.pop(handler, None)
        if turn is not None:
            return self._over(turn)
        if delivered is not None and isinstance(delivered.data, MessagePosted):
            # It waits for something else, and reads that with its next turn.
            return self._meanwhile(Moment(delivered))
        return []

    def _remark(self, event: Event) -> list[Entry]:
        arrives = isinstance(event.data, MessagePosted) and event.to in self._roles
        if arrives or isinstance(event.data, SILENT):
            return []
        turn = self._turns.get((event.role, event.causation_id or ""))
        if turn is None:
            return self._meanwhile(Moment(event))
        turn.said.append(Moment(event))
        return []

    # --- what belongs to what --------------------------------------------------------------------------------------

    def _turn(self, event: Event) -> Turn:
        """That of the handler that emitted the event; begun where there is none."""
        handler = (event.role, event.causation_id or "")
        if handler not in self._turns:
            turn = Turn(self._work(handler))
            self._turns[handler] = self.open[id(turn)] = turn
        return self._turns[handler]

    def _work(self, handler: _Handler) -> Work:
        if handler not in self._works:
            role, _ = handler
            delivered = self.pending.get(handler)
            origin, handed_over = self._origin(delivered)
            self._began += 1
            self._works[handler] = Work(role, self._began, delivered, origin, handed_over)
        return self._works[handler]

    def _origin(self, delivered: Event | None) -> tuple[str, bool]:
        """The role behind what was delivered, and whether it handed the task over."""
        event, handed_over = delivered, False
        while event is not None:
            handed_over = handed_over or isinstance(event.data, HandoffMade)
            if isinstance(event.data, EpisodeRequested):
                return "task", handed_over
            if event.role in self.totals.agents:
                return event.role, handed_over
            cause = self._causes.get(event.causation_id or "")
            event = cause if cause is not None and cause.seq < event.seq else None
        return delivered.role if delivered is not None else "", handed_over

    def _deliver(self, event: Event) -> None:
        for role in receivers(event, self._roles, self._roles):
            self.pending[role, event.id] = event

    def _over(self, turn: Turn) -> list[Entry]:
        turn.over = True
        return self._settle(turn)

    def _settle(self, turn: Turn) -> list[Entry]:
        return [self.open.pop(id(turn))] if turn.over and not turn.unanswered else []


def by_work(entries: Iterable[Entry]) -> list[Entry]:
    """Each role's turns together, where several worked at once; what is nobody's turn stays behind what it followed."""
    keyed: list[tuple[tuple[int, float], Entry]] = []
    beginnings, key = 0, (0, 0.0)
    for entry in entries:
        match entry:
            case Beginning():
                beginnings += 1
                key = (beginnings, 0.0)
            case Turn():
                key = (beginnings, float(entry.work.number))
            case End():
                key = (beginnings, float("inf"))
            case Moment():
                pass
        keyed.append((key, entry))
    keyed.sort(key=lambda one: one[0])
    return [entry for _, entry in keyed]


def _seconds(start: datetime | None, end: datetime) -> float:
    """Not less than 0, for machines' clocks differ."""
    return 0.0 if start is None else max((end - start).total_seconds(), 0.0)
