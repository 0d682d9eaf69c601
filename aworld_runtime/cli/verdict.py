"""Whether what the store lacks is lost, or on its way: `archive.verify` compares, here the differences are judged.

An archiver copies each log in order, a moment after it has grown. So an event that the store lacks at the end of a log
is waited for; then it is behind while its run goes on, or its episode, which workers end after a run that was
interrupted; and a difference once both have ended. All else is a difference at once: another event at the same place,
one that only the store has, one missing between others.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio

from aworld_runtime.archive.verify import Comparison, Difference, compare
from aworld_runtime.bus.base import Bus
from aworld_runtime.events import EpisodeFinished, RunFinished
from aworld_runtime.names import episode_of_log, run_log, run_of_log
from aworld_runtime.store.base import Store

WAIT_S = 3.0
"""For an archiver that is at work."""
LOOK_AGAIN_S = 0.2


class Verdict(Comparison):
    """A comparison whose `differing` are those that time won't mend."""

    behind: int = 0
    """Events that the store has not got yet, of runs and episodes that go on."""


async def judge(bus: Bus, store: Store, prefix: str = "", *, wait_s: float = WAIT_S) -> Verdict:
    """Compare every log whose name begins with `prefix`; where the store lacks some, give it a little time."""
    found = await compare(bus, store, prefix)
    unlisted = found.differing - len(found.differences)
    with anyio.move_on_after(wait_s):
        while await _missing(store, found.differences) or unlisted > 0:
            await anyio.sleep(LOOK_AGAIN_S)
            if unlisted > 0:
                found = await compare(bus, store, prefix)
                unlisted = found.differing - len(found.differences)
    left = [one for one in found.differences if not await _same(bus, store, one)]
    behind = [one for one in await _missing(store, left) if await _goes_on(bus, one)]
    differences = tuple(one for one in left if one not in behind)
    return Verdict(
        logs=found.logs,
        events=found.events + len(found.differences) - len(left),
        archived_logs=found.archived_logs,
        archived_events=found.archived_events,
        unfinished=found.unfinished,
        differing=len(differences) + unlisted,
        differences=differences,
        behind=len(behind),
    )


async def _missing(store: Store, differences: Sequence[Difference]) -> list[Difference]:
    """Those beyond the end of what the store has of their log."""
    ends = {log: await store.last_seq(log) for log in {one.log for one in differences}}
    return [one for one in differences if one.on_bus is not None and one.seq > ends[one.log]]


async def _same(bus: Bus, store: Store, one: Difference) -> bool:
    """Whether both have it by now: either may have been read before the other grew."""
    on_bus = one.on_bus or await _id_at(bus, one)
    return on_bus is not None and on_bus == await _id_at(store, one)


async def _id_at(where: Bus | Store, one: Difference) -> str | None:
    events = await where.read(one.log, one.seq, limit=1)
    return next((event.id for event in events if event.seq == one.seq), None)


async def _goes_on(bus: Bus, one: Difference) -> bool:
    """Whether its run or its episode has not ended: somebody may still be archiving."""
    events = await bus.read(one.log, one.seq, limit=1)
    run_id = events[0].run_id if events else None
    return await _is_open(bus, one.log) or (
        run_id is not None and await _is_open(bus, run_log(run_id))
    )


async def _is_open(bus: Bus, log: str) -> bool:
    """Whether it is the log of an episode or a run, and its last event isn't an end."""
    if episode_of_log(log) is None and run_of_log(log) is None:
        return False
    last = await bus.last_seq(log)
    newest = await bus.read(log, last, limit=1) if last else []
    return any(not isinstance(event.data, EpisodeFinished | RunFinished) for event in newest)
