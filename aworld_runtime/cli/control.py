"""`aworld cancel, pause, resume EPISODE|RUN`: a word to the owners of episodes, which passes all other mail."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from aworld_runtime.cli.own_types import add_program, own_types
from aworld_runtime.cli.shared import (
    LAST,
    add_bus,
    add_json,
    add_store,
    find_episode,
    joined_bus,
    run_async,
    stored,
    tell_outcomes,
)
from aworld_runtime.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    from aworld_runtime.bus.base import Bus
    from aworld_runtime.cli.own_types import OwnTypes
    from aworld_runtime.events import Event, EventData

DOES = {
    "cancel": "End an episode, or all unfinished ones of a run, and wait until their logs say so. A training makes another"
    " attempt at what is cancelled.",
    "pause": "Let an episode, or all unfinished ones of a run, start nothing new, and wait until their logs say so. What runs"
    " ends; time limits stand still, and the worker's slot stays taken, until aworld resume.",
    "resume": "Let an episode that is paused, or all of a run, go on, and wait until their logs say so.",
}
WAIT_S = 10.0
ALL = 1_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DOES[parser.prog.split()[-1]]
    parser.add_argument(
        "name",
        metavar="EPISODE|RUN",
        help="an episode (the beginning of its id will do), a run, or last (the newest episode)",
    )
    parser.add_argument("--reason", default="", help="for the log")
    parser.add_argument(
        "--wait",
        type=float,
        default=WAIT_S,
        metavar="SECONDS",
        help=f"for the owners (default {WAIT_S:g}); what they have not heard by then they hear later",
    )
    add_program(parser)
    add_bus(parser)
    add_store(parser)
    add_json(parser)
    parser.epilog = f"example: {parser.prog} last --bus redis://host:6379"


def cancel(arguments: argparse.Namespace) -> int:
    from aworld_runtime.events import EpisodeCancelled

    reason = arguments.reason or "cancelled by hand"
    return run_async(_tell, arguments, EpisodeCancelled(reason=reason), "cancelled")


def pause(arguments: argparse.Namespace) -> int:
    from aworld_runtime.events import EpisodePaused

    return run_async(_tell, arguments, EpisodePaused(reason=arguments.reason), "paused")


def resume(arguments: argparse.Namespace) -> int:
    from aworld_runtime.events import EpisodeResumed

    return run_async(_tell, arguments, EpisodeResumed(reason=arguments.reason), "resumed")


async def _tell(arguments: argparse.Namespace, data: EventData, done: str) -> int:
    if arguments.wait < 0:
        raise UsageError(f"--wait {arguments.wait:g}: expected 0 or more")
    with own_types(arguments.program) as types:
        return await _tell_all(arguments, data, done, types)


async def _tell_all(
    arguments: argparse.Namespace, data: EventData, done: str, types: OwnTypes
) -> int:
    import anyio

    async with joined_bus(arguments.bus) as bus:
        told = [await _send(bus, last, data) for last in await unfinished(bus, arguments, types)]
        outcomes = dict.fromkeys((e.episode_id or "" for e in told), f"not {done} yet")

        async def watch(event: Event, start: int) -> None:
            outcomes[event.episode_id or ""] = await outcome(bus, event, start, done)

        with anyio.move_on_after(arguments.wait):
            async with anyio.create_task_group() as tasks:
                for event in told:
                    tasks.start_soon(watch, event, event.seq + 1)
    return tell_outcomes(outcomes, of="episode", done=done, as_json=arguments.json)


async def _send(bus: Bus, last: Event, data: EventData) -> Event:
    """Mail it; returns the mail, with the place after which its log will have it."""
    from aworld_runtime.events import Event
    from aworld_runtime.names import episode_log

    event = Event.of(
        data,
        source="cli/control",
        run_id=last.run_id,
        task_id=last.task_id,
        group_id=last.group_id,
        episode_id=last.episode_id,
        trust="user",
    )
    await bus.send_mail(episode_log(last.episode_id or ""), event)
    return event.at(last.seq)


async def outcome(bus: Bus, told: Event, start: int, done: str) -> str:
    from aworld_runtime.events import EpisodeFinished
    from aworld_runtime.names import episode_log

    async with bus.tail(episode_log(told.episode_id or ""), start) as events:
        async for event in events:
            if event.id == told.id:
                return done
            if isinstance(event.data, EpisodeFinished):
                return f"finished before it was {done}: {event.data.reason}"
    raise AssertionError("a tail never ends")


async def unfinished(bus: Bus, arguments: argparse.Namespace, types: OwnTypes) -> list[Event]:
    """The last event of each episode that is meant.

    Raises:
        NotFoundError: there is none on this bus.
        UsageError: it has finished.
    """
    from aworld_runtime.events import EpisodeFinished

    if arguments.name != LAST and (last := await _last(bus, arguments.name, types)) is not None:
        found = [last]
    else:
        found = await _stored(bus, arguments, types)
    running = [event for event in found if not isinstance(event.data, EpisodeFinished)]
    if not running:
        ends = {e.data.reason for e in found if isinstance(e.data, EpisodeFinished)}
        which = f"episode {found[0].episode_id}" if len(found) == 1 else repr(arguments.name)
        raise UsageError(f"{which} has finished ({', '.join(sorted(ends))})")
    return running


async def _stored(bus: Bus, arguments: argparse.Namespace, types: OwnTypes) -> list[Event]:
    """As `unfinished`, by what the store knows of runs and ids."""
    name: str = arguments.name
    async with stored(arguments.store) as store:
        run = next((run for run in await store.runs(limit=ALL) if run.id == name), None)
        if run is None:
            ids = [(await find_episode(store, name)).id]
        else:
            ids = [e.id for e in await store.episodes(run_id=run.id, limit=ALL) if not e.status]
            if not ids:
                raise UsageError(f"run {name!r} has no unfinished episode")
    lasts = [await _last(bus, episode, types) for episode in ids]
    found = [last for last in lasts if last is not None]
    if not found:
        raise NotFoundError(f"bus {bus.url} has no episode of {name!r}: is it another bus?")
    return found


async def _last(bus: Bus, episode: str, types: OwnTypes) -> Event | None:
    from aworld_runtime.names import episode_log

    log = episode_log(episode)
    await types.of(bus, log)
    seq = await bus.last_seq(log)
    events = await bus.read(log, seq, limit=1) if seq else []
    return events[0] if events else None
