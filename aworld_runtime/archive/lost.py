"""A log of which a server lost events: whoever knows them puts them back, and the log says that more may be missing.

    put_back      an owner, a run's writer, or the janitor with what the store has
    after_loss    who does not know whether it was all: whoever claims the episode says so
    say_restored  the janitor, of what the store has: the log goes on from what there is
    say_lost      who requested an episode of which nobody knows any more: it begins again
    say_ended     who was told how such an episode ended: it stays ended

Acknowledged events are facts, so whoever knows them may put them back: the very same ones, since a store may have them
already, and what they caused goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial

from aworld_runtime.archive.logs import Logs
from aworld_runtime.bus.base import Bus
from aworld_runtime.bus.room import when_there_is_room
from aworld_runtime.errors import Fenced
from aworld_runtime.events import EpisodeFinished, EpisodeRequested, Event, LogRestored
from aworld_runtime.names import episode_log

logger = logging.getLogger(__name__)

PAGE = 1000
"""Events put back in one step: more than a server loses that comes back without its last second."""


async def put_back(bus: Bus, log: str, known: Sequence[Event]) -> int:
    """Append what the bus lacks of `known`, which is the log's beginning, without a hole; how many events that was.

    0 where it lacks none, or holds another log: see `begins`.
    """
    if not known:
        return 0
    before, last = known[0].seq - 1, known[-1].seq
    there = first = await bus.last_seq(log)
    while there < last:  # others may put back what they know at the same time
        if not await begins(bus, log, there, known):
            return 0
        append = partial(bus.append, log, there, known[there - before : there - before + PAGE])
        restore = partial(bus.restore, log, known)
        with suppress(Fenced):
            await when_there_is_room(append if there else restore, who=log)
        there = await bus.last_seq(log)
    if lost := max(last - max(first, before), 0):
        logger.warning("%s: the bus lost its last %d events; they are put back", log, lost)
    return lost


async def begins(bus: Bus, log: str, there: int, known: Sequence[Event]) -> bool:
    """Whether the log on the bus, whose last seq is `there`, is a beginning of what is known: its last event tells."""
    last = await bus.read(log, there, limit=1) if there else ()
    return [event.id for event in last] == [event.id for event in known if event.seq == there]


def after_loss(requested: Event) -> Event:
    """A request to queue again: who claims it begins with `log.restored`."""
    if not isinstance(requested.data, EpisodeRequested):
        return requested
    data = requested.data.model_copy(update={"after_loss": True})
    return requested.model_copy(update={"data": data})


async def say_restored(bus: Bus, log: str, at: int, first: Event, *, source: str) -> bool:
    """`log.restored`, after event `at`; whether it was said: a log that has gone on since had somebody who knew more.

    `first` is the log's first event.
    """
    return await _append(bus, log, at, [first.caused(LogRestored(at=at), source=source)])


async def say_lost(bus: Bus, requested: Event, *, source: str) -> None:
    """Of an episode that has not ended: whether it had begun, and how far it was. It is to be requested again."""
    restored = requested.caused(LogRestored(at=0), source=source)
    await _append(bus, episode_log(requested.episode_id or ""), 0, [requested, restored])


async def say_ended(bus: Bus, logs: Logs, known: Iterable[Event], *, source: str) -> None:
    """Of those in `known` that have ended, and whose log is nowhere: how they ended."""
    for event in tuple(known):
        if isinstance(event.data, EpisodeFinished) and event.episode_id is not None:
            log = episode_log(event.episode_id)
            if await logs.last_seq(log):
                continue
            restored = Event.of(
                LogRestored(at=0),
                source=source,
                run_id=event.run_id,
                task_id=event.task_id,
                group_id=event.group_id,
                episode_id=event.episode_id,
            )
            await _append(bus, log, 0, [restored, event])


async def _append(bus: Bus, log: str, expected: int, events: Sequence[Event]) -> bool:
    numbered = [event.at(seq) for seq, event in enumerate(events, expected + 1)]
    try:
        await when_there_is_room(partial(bus.append, log, expected, numbered), who=log)
    except Fenced:
        return False
    return True
