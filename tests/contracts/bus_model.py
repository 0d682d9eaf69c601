"""What a bus must hold and may do, in plain Python, for one history of calls (test_bus_machine.py).

A log is a list of events. Work has a window: nobody may get it before `since`, and by `until` somebody who waits must.
All that a lease, a delay or a death does is to move that window. A bus whose time is the history's own is held to it
exactly; one on a real server is as late as it likes, and who still works there may lose a lease to a busy machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from aworld_runtime.bus import Delivery, Mail
from aworld_runtime.bus.base import MAX_DELIVERIES, Lane, lane_of
from aworld_runtime.events import EpisodeForked, Event

NEVER = math.inf


# --- logs ----------------------------------------------------------------------------------------


@dataclass(eq=False)
class Letter:
    """One mail as it was sent; who sends an event twice sends two."""

    event: Event
    id: str | None = None
    """What the bus calls it, once somebody has read it."""


@dataclass
class ModelLog:
    name: str
    events: list[Event] = field(default_factory=list[Event])
    """What the bus holds."""
    stored: list[Event] = field(default_factory=list[Event])
    """What a store holds that has archived all of it."""
    mail: dict[Lane, list[Letter]] = field(default_factory=lambda: {"control": [], "data": []})
    """What waits for the owner."""
    told: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """What the feed tells of it: first and last of each append."""
    retired_until: float = NEVER

    @property
    def first(self) -> int:
        return self.events[0].seq if self.events else 1

    @property
    def retired(self) -> bool:
        return self.retired_until < NEVER

    @property
    def last(self) -> int:
        return self.events[-1].seq if self.events else 0

    def append(self, expected: int, events: Sequence[Event], acks: Sequence[Letter]) -> bool:
        """Whether it is accepted."""
        begins = not self.events and _forks_at(expected, events)
        if begins or (expected == self.last and not self.retired):
            if events and not self.events:
                self.stored = []  # it begins anew
            self._grow([event.at(seq) for seq, event in enumerate(events, expected + 1)])
        elif not self._stands(expected, events):
            return False
        for letters in self.mail.values():
            letters[:] = [letter for letter in letters if letter not in acks]
        return True

    def restore(self, events: Sequence[Event]) -> None:
        replaced = self.retired and [e.id for e in self.events] == [e.id for e in events[-1:]]
        if events and (replaced or not self.events):
            self.events, self.retired_until = [], NEVER
            self._grow(events)

    def unlink(self, until: float) -> None:
        self.mail = {"control": [], "data": []}
        self.events = self.events[-1:]
        self.retired_until = until if self.events else NEVER

    def forget(self, now: float) -> None:
        """What is left of a retired log goes after its time."""
        if self.retired_until <= now:
            self.events, self.retired_until = [], NEVER

    def send(self, events: Sequence[Event]) -> None:
        for event in events:
            self.mail[lane_of(event)].append(Letter(event))

    def waiting(self) -> list[Letter]:
        """In the order in which the owner gets it."""
        return self.mail["control"] + self.mail["data"]

    def letter(self, mail: Mail) -> Letter | None:
        """None where it is acknowledged, or was freed with the log."""
        return next((letter for letter in self.mail[mail.lane] if letter.id == mail.id), None)

    def _grow(self, events: Sequence[Event]) -> None:
        if events:
            if events[-1] not in self.stored:
                self.stored = [e for e in self.stored if e.seq < events[0].seq] + [*events]
            self.events += events
            self.told.append((events[0].seq, events[-1].seq))

    def _stands(self, expected: int, events: Sequence[Event]) -> bool:
        """Whether these very events are there already: the reply was lost."""
        places = range(expected + 1, expected + 1 + len(events))
        there = [event.id for event in self.events if event.seq in places]
        return bool(events) and there == [event.id for event in events]


def _forks_at(expected: int, events: Sequence[Event]) -> bool:
    first = events[0].data if events else None
    return expected > 0 and isinstance(first, EpisodeForked) and first.at == expected


# --- queues --------------------------------------------------------------------------------------


@dataclass(eq=False)
class Held:
    """Work as somebody got it."""

    work: Work
    by: str
    """Which consumer."""
    delivery: Delivery
    former: Held | None
    """Who had it until then."""
    free_since: float
    """When it could first be got."""


@dataclass(eq=False)
class Work:
    event: Event
    number: int
    """Its place among all work of the queue."""
    since: float
    until: float
    placed: bool
    """Fresh, given back, or lost by its holder: it comes before all such work that was put later."""
    late: bool
    """Its deadline has passed: it goes to the dead letters when somebody reads it."""
    doubtful: bool = False
    """It may have become one with another copy of its event, which waits as it does."""
    deliveries: int = 0
    failures: int = 0
    holder: Held | None = None


@dataclass(eq=False)
class Dead:
    event: Event
    reason: str
    deliveries: int
    late: bool = False
    id: str | None = None
    """What the bus calls it, once it has been listed."""


@dataclass
class ModelQueue:
    exact: bool
    """The bus keeps time as the model does, and copies of an event apart."""
    work: list[Work] = field(default_factory=list[Work])
    """All that is unsettled."""
    dead: list[Dead] = field(default_factory=list[Dead])
    repeated: set[str] = field(default_factory=set[str])
    """Events that were put more than once."""
    in_order: bool = True
    """Whether what has its place comes in that order: one consumer's does; of several, each may hold some."""
    disturbed: bool = False
    """Somebody is gone, whose leases run out some time: also those of what nobody has seen."""
    put: int = 0

    def add(
        self, event: Event, since: float, until: float, *, delayed: bool = False, late: bool = False
    ) -> None:
        self.put += 1
        if any(work.event.id == event.id for work in self.work):
            self.repeated.add(event.id)
        self.work.append(Work(event, self.put, since, until, placed=not delayed, late=late))
        if delayed:
            self._doubt(self.work[-1])

    def joined(self, *, alone: bool) -> None:
        """Somebody is there now whom nobody disturbs, or not."""
        free = all(work.holder is None for work in self.work)
        self.in_order = self.exact or (alone and free and not self.disturbed)

    def wanted(self) -> list[Work]:
        """What consumers get sooner or later."""
        return [work for work in self.work if not work.late]

    def sure(self, now: float) -> list[Work]:
        """What must come to a consumer that waits."""
        return [work for work in self.wanted() if work.until <= now and not work.doubtful]

    def deliver(
        self,
        delivery: Delivery,
        by: str,
        *,
        asked: float,
        now: float,
        elsewhere: Sequence[Work] = (),
    ) -> Held:
        """Who asked for work has got it now, and it must have been right; it is no copy that is held elsewhere."""
        what = f"{delivery.event.source} ({delivery.count}. delivery)"
        copies = [work for work in self.wanted() if self._is(work, delivery.event)]
        assert copies, f"{what} is settled, or was never put"
        free = [work for work in copies if work.since <= now and work not in elsewhere]
        assert free, f"{what} is delayed, or somebody has it"
        fitting = [work for work in free if work.deliveries + 1 == delivery.count]
        assert fitting or not self.exact, f"{what} had {free[0].deliveries} deliveries before"
        # Of copies that can't be told apart, the surest: what is left then may only come later, or not at all.
        work = min(fitting or free, key=lambda w: (w.doubtful, not w.placed, w.until, w.number))
        placed = [w for w in self.wanted() if w.placed and not self._has_twin(w)]
        if work in placed and self.in_order:
            waiting = [w for w in placed if w.number < work.number and w.until <= asked]
            assert not waiting, f"{what} overtakes {waiting[0].event.source}"
        # Servers count what was in the buffer of a consumer that died, though nobody saw it.
        assert self.exact or delivery.count > work.deliveries or self._has_twin(work), what
        work.deliveries, work.doubtful = delivery.count, False
        work.holder = Held(work, by, delivery, former=work.holder, free_since=work.since)
        work.since = work.until = NEVER
        return work.holder

    def counts(self, held: Held, now: float) -> bool | None:
        """Whether what its holder says of it counts; None where its lease may have run out: unless that was noticed."""
        if held.work.holder is not held or held.work not in self.work:
            return False
        return True if now < held.work.since else None

    def settle(self, held: Held) -> None:
        self.work.remove(held.work)

    def bury(self, work: Work, reason: str) -> None:
        self.work.remove(work)
        self.dead.append(Dead(work.event, reason, work.deliveries, late=work.late))

    def fail(self, held: Held, reason: str, again: tuple[float, float], *, comes: bool) -> None:
        """The bus says whether it comes again; it must do so within `again`."""
        work = held.work
        work.failures += 1
        right = comes == (work.failures < MAX_DELIVERIES)
        assert right or self._has_twin(work), f"{work.event.source} failed {work.failures} times"
        if comes:
            work.holder, (work.since, work.until), work.placed = None, again, False
            self._doubt(work)
        else:
            self.bury(work, reason)

    def expire(self, by: str, end: float) -> None:
        """Whoever is called so renews no leases any more."""
        self.disturbed = True
        for work in self._held_by(by):
            work.since, work.until = min(work.since, end), end

    def renew(self, by: str) -> None:
        """It does so again."""
        for work in self._held_by(by):
            work.until = NEVER

    def release(self, by: str, now: float) -> None:
        """What it holds is given back."""
        for work in self._held_by(by):
            work.since, work.until, work.holder = now, now, None

    def _held_by(self, by: str) -> list[Work]:
        return [work for work in self.work if work.holder is not None and work.holder.by == by]

    def _is(self, work: Work, event: Event) -> bool:
        """Copies of an event are told apart where it is never encoded."""
        return work.event is event if self.exact else work.event.id == event.id

    def _has_twin(self, work: Work) -> bool:
        """Whether it may have been taken for another copy of its event."""
        return not self.exact and work.event.id in self.repeated

    def _doubt(self, work: Work) -> None:
        """Of copies that wait in the same way, one may stay, and comes when any of them would have."""
        twins = [w for w in self.work if w.event.id == work.event.id and w.holder is None]
        if self.exact or len(twins) < 2:
            return
        since, until = min(w.since for w in twins), max(w.until for w in twins)
        for twin in twins:
            twin.doubtful = twin is not twins[0]
            twin.since, twin.until = since, until
