"""Compares what clients were told with what the bus and the store hold once everything was healed.

    acked_lost         an append was acknowledged, and its events aren't at exactly those seqs
    duplicate_commits  an event twice in a log, a seq with two bodies, two ends of an episode
    order_violations   gaps, something after the end, an effect before its cause, one sender's mail out of order
    silent_hangs       an episode was requested, and nothing says how it ended
    wrong_ends         a healthy episode ended in another way than it would have without any fault
    queue_lost         work was acknowledged and never delivered, while the server kept its data
    not_archived       the store lacks events though its archiver says that it is done

A loss that a log tells of itself (`log.restored` at or before the seq, or an end that names the loss) is no violation where
the server came back empty after the append: it failed loudly. Everything here is a function of plain data.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from aworld_runtime.archive.marker import is_marker
from aworld_runtime.chaos.history import Operation
from aworld_runtime.chaos.plan import Blow
from aworld_runtime.names import EPISODES_QUEUE, episode_log, episode_of_log

RESTORED = "log.restored"
FINISHED = "episode.finished"
REQUESTED = "episode.requested"
TAKEN_OVER = "episode.taken_over"
EMPTIED = "server_emptied"
LOSS_WORDS = ("lost", "restored")
"""In the error of an episode that was ended because the bus lost its data."""
NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Stored:
    """One event as bus or store hold it."""

    id: str
    body: int
    """A checksum."""
    type: str
    cause: str | None = None
    reason: str = ""
    """Of `episode.finished`: how it ended."""
    says: str = ""
    """Of `episode.finished`: its answer, or its error."""


@dataclass(frozen=True)
class Log:
    """One log, by seq, as the bus and as the store hold it."""

    bus: Mapping[int, Stored] = field(default_factory=dict[int, Stored])
    store: Mapping[int, Stored] = field(default_factory=dict[int, Stored])

    @cached_property
    def events(self) -> dict[int, Stored]:
        """Where the bus let the log go, the store counts; what the bus should have and hasn't is missing."""
        first = min(self.bus, default=NEVER)
        kept = {seq: event for seq, event in self.store.items() if seq < first}
        return dict(sorted((kept | dict(self.bus)).items()))

    @property
    def last(self) -> int:
        return max(self.events, default=0)

    @cached_property
    def ends(self) -> list[int]:
        return [seq for seq, event in self.events.items() if event.type == FINISHED]

    @cached_property
    def loud_from(self) -> float:
        """The seq from which on the log itself says that something was lost."""
        for seq in self.ends:
            end = self.events[seq]
            if end.reason == "failed" and any(word in end.says for word in LOSS_WORDS):
                return 0
        return next((seq for seq, event in self.events.items() if event.type == RESTORED), NEVER)


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that must not be."""

    what: str
    log: str
    seq: int
    detail: str


@dataclass(frozen=True)
class Evidence:
    """All that is known after a run."""

    operations: Sequence[Operation]
    logs: Mapping[str, Log]
    blows: Sequence[Blow] = ()
    answer: Callable[[str], str | None] = lambda _: None
    """What a healthy episode has to answer, by its id; None for one that misbehaves."""

    @cached_property
    def calls(self) -> Mapping[str, list[Operation]]:
        """The operations by what was called."""
        calls: dict[str, list[Operation]] = defaultdict(list)
        for operation in self.operations:
            calls[operation.call].append(operation)
        return calls

    def log(self, name: str) -> Log:
        return self.logs.get(name, NOTHING)

    def excused(self, append: Operation, seq: int) -> bool:
        """Whether its log says that what it brought there may be lost, as it may where the server came back empty after it."""
        after = any(b.kind == EMPTIED and b.ended > append.began for b in self.blows)
        return after and seq >= self.log(append.target).loud_from

    def rewound_from(self, name: str) -> float:
        """Where the store has another history than the bus, and the log says so: its archiver calls it an incident, and copies
        no more of it.
        """
        log = self.log(name)
        other = next((s for s, e in log.bus.items() if log.store.get(s, e).id != e.id), NEVER)
        emptied = any(blow.kind == EMPTIED for blow in self.blows)
        return other if emptied and other >= log.loud_from else NEVER


NOTHING = Log()


def check(evidence: Evidence) -> list[Violation]:
    """All violations."""
    return [violation for rule in RULES for violation in rule(evidence)]


def acked(operations: Iterable[Operation]) -> int:
    """Events whose append was acknowledged, each once."""
    appends = (op for op in operations if op.call == "append" and op.outcome == "ok")
    return len({event_id for op in appends for event_id in op.ids})


def loud(logs: Mapping[str, Log]) -> list[str]:
    """Logs that tell of a loss."""
    return [name for name, log in logs.items() if log.loud_from < NEVER]


def gather(violations: Iterable[Violation]) -> list[Violation]:
    """The first of each sort in each log, with the number of the others."""
    sorts: dict[tuple[str, str], list[Violation]] = defaultdict(list)
    for violation in violations:
        sorts[violation.what, violation.log].append(violation)
    return [
        first
        if not others
        else replace(
            first, detail=f"{first.detail} (and {len(others)} more, to seq {others[-1].seq})"
        )
        for first, *others in sorts.values()
    ]


# --- rules ---------------------------------------------------------------------------------------------------------


def lost(evidence: Evidence) -> Iterator[Violation]:
    """Acknowledged events that aren't where they were acknowledged."""
    for op in evidence.calls["append"]:
        log = evidence.log(op.target)
        if is_marker(op.target):
            continue  # unlinked at once
        for seq, event_id in enumerate(op.ids if op.outcome == "ok" else (), op.after + 1):
            there = log.events.get(seq)
            if (there is None or there.id != event_id) and not evidence.excused(op, seq):
                found = "nothing" if there is None else f"{there.type} {there.id}"
                told = f"{op.process} was told that {event_id} is there; there is {found}"
                yield Violation("acked_lost", op.target, seq, told)


def duplicates(evidence: Evidence) -> Iterator[Violation]:
    """Something is there twice."""
    for name, log in evidence.logs.items():
        places: dict[str, list[int]] = defaultdict(list)
        for seq, event in log.events.items():
            places[event.id].append(seq)
        for event_id, seqs in places.items():
            if len(seqs) > 1:
                told = f"{log.events[seqs[0]].type} {event_id} stands at {seqs}"
                yield Violation("duplicate_commits", name, seqs[1], told)
        if len(log.ends) > 1 and episode_of_log(name):
            told = f"it ended at {log.ends}"
            yield Violation("duplicate_commits", name, log.ends[1], told)


def two_bodies(evidence: Evidence) -> Iterator[Violation]:
    """A seq with two events, or an event that isn't as it was sent."""
    told_first: dict[tuple[str, int], tuple[str, Operation]] = {}
    sent: dict[str, int] = {}
    for op in sorted(evidence.calls["append"], key=lambda op: op.began):
        sent |= zip(op.ids, op.bodies, strict=True)
        for seq, event_id in enumerate(op.ids if op.outcome == "ok" else (), op.after + 1):
            first, earlier = told_first.setdefault((op.target, seq), (event_id, op))
            if first != event_id and not evidence.excused(earlier, seq):
                told = f"{first} and {event_id} were both acknowledged there"
                yield Violation("duplicate_commits", op.target, seq, told)
    for name, log in evidence.logs.items():
        rewound = evidence.rewound_from(name)
        for seq, event in log.bus.items():
            kept = log.store.get(seq, event)
            if (kept.id, kept.body) != (event.id, event.body) and seq < rewound:
                told = f"the bus has {event.type} {event.id}, the store {kept.type} {kept.id}"
                yield Violation("duplicate_commits", name, seq, told)
        for seq, event in log.events.items():
            if sent.get(event.id, event.body) != event.body:
                told = f"{event.type} {event.id} isn't as it was sent"
                yield Violation("duplicate_commits", name, seq, told)


def order(evidence: Evidence) -> Iterator[Violation]:
    """Something isn't where it belongs."""
    for name, log in evidence.logs.items():
        for one, two in pairwise([0, *log.events]):
            if two != one + 1:
                yield Violation("order_violations", name, two, f"after {one} comes {two}")
        seqs = {event.id: seq for seq, event in log.events.items()}
        for seq, event in log.events.items():
            cause = seqs.get(event.cause or "", 0)
            if cause > seq:
                told = f"{event.type} stands before its cause at {cause}"
                yield Violation("order_violations", name, seq, told)
        if episode_of_log(name) and log.ends and log.ends[0] != log.last:
            told = f"{log.events[log.last].type} follows the end at {log.ends[0]}"
            yield Violation("order_violations", name, log.last, told)


def mail_order(evidence: Evidence) -> Iterator[Violation]:
    """Mail of one sender that entered a log before what had been acknowledged to him earlier."""
    places = {
        name: {event.id: seq for seq, event in log.events.items()}
        for name, log in evidence.logs.items()
    }
    sent = Counter(event_id for op in evidence.calls["mail"] for event_id in op.ids)
    entered: dict[tuple[str, str], float] = {}
    for op in evidence.calls["append"]:
        for event_id in op.ids if op.outcome != "fail" else ():
            began = entered.get((op.target, event_id), NEVER)
            entered[op.target, event_id] = min(began, op.began)
    latest: dict[tuple[str, str], tuple[float, int]] = {}
    for op in sorted(evidence.calls["mail"], key=lambda op: op.began):
        for event_id in op.ids:
            seq = places.get(op.target, {}).get(event_id)
            if seq is None or op.ended is None or op.outcome != "ok" or sent[event_id] > 1:
                continue  # sent by two, the first one counts: its place says nothing
            if entered.get((op.target, event_id), NEVER) < op.began:
                continue  # who read of it elsewhere had entered it before it was sent
            ended, before = latest.get((op.target, op.process), (NEVER, 0))
            if op.began > ended and seq < before:
                told = f"mail {event_id} of {op.process} stands before its earlier mail at {before}"
                yield Violation("order_violations", op.target, seq, told)
            if seq > before:
                latest[op.target, op.process] = (op.ended, seq)


def hangs(evidence: Evidence) -> Iterator[Violation]:
    """Episodes without an end, of those that were put into the queue or were begun."""
    wanted = {name for name, log in evidence.logs.items() if log.events and episode_of_log(name)}
    for op in evidence.calls["put"]:
        if op.target == EPISODES_QUEUE and op.outcome == "ok":
            rows = zip(op.types, op.episodes, strict=True)
            wanted |= {episode_log(episode) for kind, episode in rows if kind == REQUESTED}
    for name in sorted(wanted):
        log = evidence.log(name)
        if not log.ends:
            last = (
                f"its last event is {log.events[log.last].type}" if log.last else "nobody began it"
            )
            yield Violation("silent_hangs", name, log.last, last)


def wrong_ends(evidence: Evidence) -> Iterator[Violation]:
    """Healthy episodes that did not end as they should."""
    for name, log in evidence.logs.items():
        wanted = evidence.answer(episode_of_log(name) or "")
        if wanted is None or not log.ends or log.loud_from == 0:
            continue
        end = log.events[log.ends[0]]
        if (end.reason, end.says) != ("answered", wanted):
            told = f"{end.reason}: {end.says[:200]!r} instead of {wanted!r}"
            yield Violation("wrong_ends", name, log.last, told)


def queue_lost(evidence: Evidence) -> Iterator[Violation]:
    """Acknowledged work that was never delivered. A server that came back empty has lost its queues."""
    emptied = [blow.ended for blow in evidence.blows if blow.kind == EMPTIED]
    taken = {event_id for op in evidence.calls["take"] for event_id in op.ids}
    for op in evidence.calls["put"]:
        if op.outcome == "ok" and not any(end > op.began for end in emptied):
            for event_id in op.ids:
                if event_id not in taken:
                    told = f"{op.process} put {event_id}, and nobody ever got it"
                    yield Violation("queue_lost", op.target, 0, told)


def not_archived(evidence: Evidence) -> Iterator[Violation]:
    """Events that only the bus has."""
    for name, log in evidence.logs.items():
        missing = [seq for seq in log.events if seq not in log.store]
        if missing and missing[0] < evidence.rewound_from(name):
            told = f"the store lacks {len(missing)} events, from {missing[0]} on"
            yield Violation("not_archived", name, missing[0], told)


RULES = (
    lost,
    duplicates,
    two_bodies,
    order,
    mail_order,
    hangs,
    wrong_ends,
    queue_lost,
    not_archived,
)
