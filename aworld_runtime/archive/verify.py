"""Does the store hold what the bus holds? Compares the event ids of every log."""

from __future__ import annotations

from collections.abc import Mapping

from aworld_runtime.archive.marker import feed_so_far
from aworld_runtime.bus.base import Bus
from aworld_runtime.events import EpisodeFinished
from aworld_runtime.forks import OwnEvents
from aworld_runtime.messages import Data
from aworld_runtime.names import episode_of_log
from aworld_runtime.store.base import Store

PAGE = 1000
LISTED = 100


class Difference(Data):
    """One position of a log at which bus and store disagree."""

    log: str
    seq: int
    on_bus: str | None
    """Event id there; None where it has no event."""
    in_store: str | None


class Comparison(Data):
    """What `compare` found."""

    logs: int = 0
    """Logs on the bus, in the store or in both."""
    events: int = 0
    """Events that are the same in both."""
    archived_logs: int = 0
    """Logs that only the store still has, but for a last event that the bus keeps of a retired one."""
    archived_events: int = 0
    unfinished: tuple[str, ...] = ()
    """The first hundred of those logs that are episodes without an end: nobody goes on with them."""
    differing: int = 0
    """Positions at which they disagree."""
    differences: tuple[Difference, ...] = ()
    """The first hundred of them."""

    @property
    def same(self) -> bool:
        return not self.differing


async def compare(bus: Bus, store: Store, prefix: str = "") -> Comparison:
    """Compare every log whose name begins with `prefix`. A log that the bus has let go is no difference."""
    names = {entry.log async for entry in feed_so_far(bus) if entry.log.startswith(prefix)}
    names.update(await store.logs(prefix))
    events = archived_logs = archived_events = differing = 0
    differences: list[Difference] = []
    unfinished: list[str] = []
    for log in sorted(names):
        on_bus, in_store = await _ids(bus, log), await _ids(store, log)
        if _retired(on_bus, in_store):
            archived_logs += 1
            archived_events += len(in_store) - len(on_bus)
            if len(unfinished) < LISTED and not await _has_ended(store, log, in_store):
                unfinished.append(log)
            events += len(on_bus)
            continue
        for seq in sorted(on_bus.keys() | in_store.keys()):
            pair = on_bus.get(seq), in_store.get(seq)
            if pair[0] == pair[1]:
                events += 1
                continue
            differing += 1
            if len(differences) < LISTED:
                differences.append(Difference(log=log, seq=seq, on_bus=pair[0], in_store=pair[1]))
    return Comparison(
        logs=len(names),
        events=events,
        archived_logs=archived_logs,
        archived_events=archived_events,
        unfinished=tuple(unfinished),
        differing=differing,
        differences=tuple(differences),
    )


async def _has_ended(store: Store, log: str, in_store: Mapping[int, str]) -> bool:
    """Whether the store has its end, if it is the log of an episode. One without a record is the beginning of a log, imported
    for a fork.
    """
    episode_id = episode_of_log(log)
    if episode_id is None or await store.episode(episode_id) is None:
        return True
    last = await store.read(log, max(in_store), limit=1) if in_store else []
    return any(isinstance(e.data, EpisodeFinished) for e in last)


def _retired(on_bus: Mapping[int, str], in_store: Mapping[int, str]) -> bool:
    """Whether the bus has let the log go: it keeps the last event for a day, then nothing."""
    return not on_bus or (
        len(on_bus) == 1 < len(in_store) and on_bus.items() <= {max(in_store.items())}
    )


async def _ids(where: Bus | Store, log: str) -> dict[int, str]:
    """Of a fork its own: what it shares is its parent's."""
    ids: dict[int, str] = {}
    start, own = 1, OwnEvents(log)
    while page := await where.read(log, start, limit=PAGE):
        ids |= {event.seq: event.id for event in own.among(page)}
        start = page[-1].seq + 1
    return ids
