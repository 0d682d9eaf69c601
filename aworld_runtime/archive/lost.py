"""What a requester says in the log of an episode that a server lost with all its data, before the store had any of it.

Nobody else knows of the episode any more. It begins again, or stays ended; either way its log tells of the loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial

from aworld_runtime.archive.logs import Logs
from aworld_runtime.bus.base import Bus
from aworld_runtime.bus.room import when_there_is_room
from aworld_runtime.errors import Fenced
from aworld_runtime.events import EpisodeFinished, Event, LogRestored
from aworld_runtime.names import episode_log


async def say_lost(bus: Bus, requested: Event, *, source: str) -> None:
    """Of an episode that has not ended: whether it had begun, and how far it was. It is to be requested again."""
    restored = requested.caused(LogRestored(at=0), source=source)
    await _write(bus, [requested, restored], source)


async def say_ended(bus: Bus, logs: Logs, known: Iterable[Event], *, source: str) -> None:
    """Of those in `known` that have ended, and whose log is nowhere: how they ended."""
    for event in tuple(known):
        if isinstance(event.data, EpisodeFinished) and event.episode_id is not None:
            if await logs.last_seq(episode_log(event.episode_id)):
                continue
            restored = Event.of(
                LogRestored(at=0),
                source=source,
                run_id=event.run_id,
                task_id=event.task_id,
                group_id=event.group_id,
                episode_id=event.episode_id,
            )
            await _write(bus, [restored, event], source)


async def _write(bus: Bus, events: Sequence[Event], who: str) -> None:
    log = episode_log(events[0].episode_id or "")
    numbered = [event.at(seq) for seq, event in enumerate(events, 1)]
    with suppress(Fenced):  # somebody knew more
        await when_there_is_room(partial(bus.append, log, 0, numbered), who=who)
