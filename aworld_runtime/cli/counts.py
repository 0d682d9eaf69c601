"""How many episodes a run asked for, and what became of them, read off its log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime

from aworld_runtime.events import (
    FAILURES,
    EpisodeFinished,
    Event,
    GroupCompleted,
    GroupRequested,
)
from aworld_runtime.messages import Data
from aworld_runtime.store.base import EpisodeRecord, RunRecord


class Counts(Data):
    """Every requested episode is in exactly one of `finished`, `given_up`, `in_flight`, `uncounted` and `lost`."""

    requested: int
    finished: int
    """Different episodes that the run counted."""
    lost: int
    """What became of it nobody knows: always 0, or something is wrong."""
    twice: int
    """Counted more than once: always 0, or something is wrong."""
    given_up: int = 0
    """Every attempt failed, and their group was completed without them."""
    in_flight: int = 0
    uncounted: int = 0
    """The run ended before they did, or before their group was complete."""
    takeovers: int = 0
    by_reason: dict[str, int] = {}
    last_news: datetime
    """When something was last heard of the run, or of one of its episodes."""

    def __str__(self) -> str:
        text = (
            f"requested {self.requested}, finished {self.finished}, lost {self.lost},"
            f" counted twice {self.twice}"
        )
        if self.given_up:
            text += f", given up {self.given_up}"
        if self.in_flight:
            text += f", in flight {self.in_flight}"
        if self.uncounted:
            text += f", left when the run ended {self.uncounted}"
        return text


def count(run: RunRecord, log: Sequence[Event], episodes: Sequence[EpisodeRecord]) -> Counts:
    """Compare what a run asked for with what it counted. `log` is the run's; `episodes` are its records."""
    sizes: dict[str, int] = {}
    complete: set[str] = set()
    counted: list[str] = []
    for event in log:
        match event.data:
            case GroupRequested(group=group, size=size):
                sizes[group] = size
            case GroupCompleted(group=group, episodes=ids):
                complete.add(group)
                counted += ids
            case _:
                pass
    given_up = 0
    if sizes:
        given_up = sum(group in complete for group, _ in _failed_places(episodes))
        requested = sum(sizes.values())
        pending = sum(size for group, size in sizes.items() if group not in complete)
    else:  # a run without groups counts single episodes
        counted = [e.episode_id or "" for e in log if isinstance(e.data, EpisodeFinished)]
        known = {e.id for e in episodes}
        requested = len(known | set(counted))
        pending = len(known - set(counted))
    finished = len(set(counted))
    return Counts(
        requested=requested,
        finished=finished,
        lost=requested - finished - given_up - pending,
        twice=len(counted) - finished,
        given_up=given_up,
        in_flight=pending if run.finished is None else 0,
        uncounted=0 if run.finished is None else pending,
        takeovers=sum(e.takeovers for e in episodes),
        by_reason=dict(Counter(status(e, run) for e in episodes).most_common()),
        last_news=max([run.started, *_times(log, episodes)]),
    )


def status(episode: EpisodeRecord, run: RunRecord | None) -> str:
    """How it ended, or that it runs; what runs no longer when its run ends was interrupted."""
    open_run = run is None or run.finished is None
    return episode.status or ("running" if open_run else "interrupted")


def _times(log: Sequence[Event], episodes: Sequence[EpisodeRecord]) -> Iterator[datetime]:
    yield from (event.time for event in log)
    for episode in episodes:
        yield from (time for time in (episode.started, episode.finished) if time is not None)


def _failed_places(episodes: Sequence[EpisodeRecord]) -> list[tuple[str, int]]:
    """Group and index of every place whose attempts have all failed."""
    failed: dict[tuple[str, int], bool] = {}
    for episode in episodes:
        if episode.group_id is not None:
            place = episode.group_id, episode.index
            failed[place] = failed.get(place, True) and episode.status in FAILURES
    return [place for place, all_failed in failed.items() if all_failed]
