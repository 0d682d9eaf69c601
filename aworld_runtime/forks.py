"""What the log of a fork says: it goes on from the middle of another, and may take a little of that back.

    1 … at      the parent's events, as they are: read from the parent's log, or copied to a server
    at + 1      episode.forked      here the fork's own begins
    at + 2      episode.requested   the request in force from here on; it is delivered to nobody
    (at + 3)    the parent's next event, edited
    …           episode.claimed, and what happens

A handler that had not ended at `at` runs again over what it had recorded. What it doesn't repeat counts no more:
`record.dropped` names it. An edited event stands for whatever its handler emits in that place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from aworld_runtime.events import EpisodeForked, EpisodeRequested, Event, RecordDropped
from aworld_runtime.names import episode_of_log

EDITED_AFTER = 3
"""Where the edited event stands: so many after the last one that is shared."""


@dataclass(frozen=True, slots=True)
class Origin:
    """How an episode began: whether, and where, it was forked."""

    requested: Event | None
    """The request in force: the last."""
    at: int = 0
    """The last event that it shares with another; 0 where it was not forked."""
    edited: frozenset[int] = frozenset()
    """Seqs of events that a person has edited, in it or in those that it comes from."""

    @classmethod
    def of(cls, events: Iterable[Event]) -> Self:
        requested, at, edited = None, 0, set[int]()
        for event in events:
            match event.data:
                case EpisodeRequested():
                    requested = event
                case EpisodeForked() as forked:
                    at = forked.at
                    if forked.edited:
                        edited.add(at + EDITED_AFTER)
                case _:
                    pass
        return cls(requested, at, frozenset(edited))

    def own(self, event: Event) -> Event:
        """`event` as this episode's: what follows from one that is shared belongs to this one."""
        if event.seq > self.at or self.requested is None:
            return event
        requested = self.requested
        return event.model_copy(
            update={
                "run_id": requested.run_id,
                "task_id": requested.task_id,
                "group_id": requested.group_id,
                "episode_id": requested.episode_id,
                "attempt": requested.attempt,
                "traceparent": requested.traceparent,
            }
        )


NOT_FORKED = Origin(None)


class OwnEvents:
    """Those of a log's own, as it is read from its beginning: on a server, copies of the parent's stand before a fork's."""

    def __init__(self, log: str) -> None:
        self._episode = episode_of_log(log)
        self._shared: bool | None = False if self._episode is None else None
        """Whether the next event is such a copy; None before the first."""

    def among(self, events: Sequence[Event]) -> Sequence[Event]:
        """Those of the next `events`."""
        if self._shared is None and events:
            # What begins a log names its episode; mail may name none.
            self._shared = events[0].episode_id not in (None, self._episode)
        if not self._shared:
            return events
        begin = next((i for i, event in enumerate(events) if self._begins(event)), len(events))
        self._shared = begin == len(events)
        return events[begin:]

    def _begins(self, event: Event) -> bool:
        return isinstance(event.data, EpisodeForked) and event.episode_id == self._episode


def dropped(events: Iterable[Event]) -> set[int]:
    """Seqs of what handlers have taken back."""
    return {seq for e in events if isinstance(e.data, RecordDropped) for seq in e.data.seqs}


def counted(events: Sequence[Event]) -> Sequence[Event]:
    """Without what handlers have taken back."""
    gone = dropped(events)
    return [event for event in events if event.seq not in gone] if gone else events
