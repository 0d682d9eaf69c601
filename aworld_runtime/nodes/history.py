"""An episode's log as its handlers see it: what each role may know when an event is delivered to it.

That is the log up to the event, and of what comes after it the role's own events from its earlier handlers: the same
live, after a takeover and replayed, however the log was interleaved. A role handles one delivery at a time, in order, so
its trajectory is folded once, from handler to handler.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from operator import attrgetter

from aworld_runtime.events import Event
from aworld_runtime.forks import counted, dropped
from aworld_runtime.trajectory import TrajectoryFold

_seq = attrgetter("seq")


@dataclass(slots=True)
class _Seen:
    """What is known of the log for one role."""

    fold: TrajectoryFold
    """Of the log's beginning."""
    folded: int = 0
    """Events in the fold."""
    dropped: set[int] = field(default_factory=set[int])
    """Of these, those that a handler has taken back."""
    own: list[Event] = field(default_factory=list[Event])
    looked: int = 0
    """Events among which `own` was looked for."""

    def begin_again(self, dropped: set[int] | None = None) -> None:
        self.fold = TrajectoryFold(self.fold.role)
        self.folded, self.dropped = 0, dropped or set()


class History:
    """Of one log, which may grow meanwhile."""

    __slots__ = ("_log", "_seen")

    def __init__(self, log: Sequence[Event]) -> None:
        self._log = log
        self._seen: dict[str, _Seen] = {}

    def until(self, event: Event, role: str) -> tuple[Event, ...]:
        """What the role may know of as it handles the event; without what handlers have taken back."""
        return tuple(counted((*self._log[: event.seq], *self._own_after(event, self._of(role)))))

    def trajectory(self, event: Event, role: str) -> TrajectoryFold:
        """The fold of the same, for the caller to keep."""
        seen = self._of(role)
        own = self._own_after(event, seen)
        if dropped(own):
            return _folded(TrajectoryFold(role), self.until(event, role))
        if seen.folded > event.seq:  # somebody looks back
            seen.begin_again()
        if gone := dropped(self._log[seen.folded : event.seq]):
            seen.begin_again(seen.dropped | gone)
        new = self._log[seen.folded : event.seq]
        _folded(seen.fold, (each for each in new if each.seq not in seen.dropped))
        seen.folded = event.seq
        return _folded(seen.fold.copy(), own)

    def forget(self) -> None:
        """Keep no folds while nothing is handled; they are made again."""
        self._seen.clear()

    def _of(self, role: str) -> _Seen:
        if role not in self._seen:
            self._seen[role] = _Seen(TrajectoryFold(role))
        return self._seen[role]

    def _own_after(self, event: Event, seen: _Seen) -> list[Event]:
        """Of the role's earlier handlers. What the handler of this event recorded itself comes behind that."""
        role = seen.fold.role
        seen.own += [e for e in self._log[seen.looked :] if e.role == role]
        seen.looked = len(self._log)
        behind = islice(seen.own, bisect_right(seen.own, event.seq, key=_seq), None)
        return list(takewhile(lambda own: own.causation_id != event.id, behind))


def _folded(fold: TrajectoryFold, events: Iterable[Event]) -> TrajectoryFold:
    for event in events:
        fold.add(event)
    return fold
