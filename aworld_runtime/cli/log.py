"""`aworld log EPISODE`: what happened, event by event. Runs no user code."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from aworld_runtime.cli.shared import (
    LAST,
    add_bus,
    add_json,
    add_store,
    find_episode,
    joined_bus,
    one_line,
    run_async,
    stored,
)

if TYPE_CHECKING:
    from datetime import datetime

    from aworld_runtime.events import Event
    from aworld_runtime.store.base import Store

DEEPEST = 12
"""Levels of indentation; deeper causes are shown at this one."""
LOOK_AGAIN_S = 0.2
"""A store tells nobody that it has grown, so following one in another process means looking."""
NARROWEST = 60
ROLE = 12
TYPE = 20
"""Columns, wide enough for nearly all; a log is shown while it grows, so what comes later isn't known."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Show an episode's or a run's log: seq, seconds since its start, role, type, what happened."
    )
    parser.add_argument(
        "log",
        nargs="?",
        default=LAST,
        metavar="EPISODE",
        help="an episode (the beginning of its id will do), a run, or last (the newest episode; the default)",
    )
    parser.add_argument("--follow", action="store_true", help="go on until the episode ends")
    parser.add_argument("--tree", action="store_true", help="indent each type below its cause's")
    parser.add_argument("--all", action="store_true", help="delivery.handled, too")
    add_bus(parser)
    add_store(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    run_async(_log, arguments)
    return 0


async def _log(arguments: argparse.Namespace) -> None:
    layout = Layout(shutil.get_terminal_size((160, 24)).columns, tree=arguments.tree)
    ended = False
    async with _events(arguments) as (events, last):
        async for event in events:
            if arguments.json:
                fields = event.model_dump_json(exclude_defaults=True)
                print(f'{{"seq":{event.seq},{fields[1:]}', flush=arguments.follow)
            elif arguments.all or event.type != "delivery.handled":
                print(layout.line(event), flush=arguments.follow)
            else:
                layout.note(event)
            if event.type in {"episode.finished", "run.finished"}:
                ended = True
            elif event.type == "run.taken_over":  # resumed
                ended = False
            if arguments.follow and ended and event.seq >= last:
                return


class Layout:
    """Lays a log out in columns, the types indented by cause where that is wanted.

    Mail is older than its place in the log: it is shown at the time of what stands before it, so that time never runs back.
    """

    def __init__(self, width: int, *, tree: bool) -> None:
        self._tree = tree
        self._width = max(width, NARROWEST)
        self._depths: dict[str, int] = {}
        self._began: datetime | None = None
        self._now: datetime | None = None

    def note(self, event: Event) -> int:
        """Remember the event; returns how deep it stands."""
        self._began = self._began or event.time
        self._now = max(self._now or event.time, event.time)
        depth = self._depths.get(event.causation_id or "", -1) + 1
        self._depths[event.id] = depth
        return min(depth, DEEPEST)

    def line(self, event: Event) -> str:
        from aworld_runtime.cli.gist import gist

        depth = self.note(event)
        began, now = self._began or event.time, self._now or event.time
        offset = (now - began).total_seconds()
        kind = f"{'  ' * depth}{event.type}" if self._tree else event.type
        start = f"{event.seq:>5} {offset:>9.3f}  {event.role:<{ROLE}}  {kind:<{TYPE}}  "
        return start + one_line(gist(event), max(self._width - len(start), NARROWEST // 2))


@asynccontextmanager
async def _events(
    arguments: argparse.Namespace,
) -> AsyncGenerator[tuple[AsyncIterator[Event], int]]:
    """The log's events, and its last seq now: from a server's bus where one is named, else from the store."""
    from aworld_runtime.archive.logs import Logs
    from aworld_runtime.config import Settings
    from aworld_runtime.names import episode_log, run_log

    async with stored(arguments.store) as store:
        bus_url = arguments.bus or Settings.from_env().bus
        if urlsplit(bus_url).scheme == "memory":
            name = await _find(store, arguments.log)
            last = await store.last_seq(name)
            yield _from_store(store, name, follow=arguments.follow), last
            return
        async with joined_bus(bus_url) as bus:
            logs = Logs(bus, store)
            names = (
                []
                if arguments.log == LAST
                else [episode_log(arguments.log), run_log(arguments.log)]
            )
            there = [name for name in names if await logs.last_seq(name)]
            name = there[0] if there else await _find(store, arguments.log)
            last = await logs.last_seq(name)
            if not arguments.follow:
                yield _each(await logs.read_all(name)), last
                return
            async with logs.tail(name) as events:
                yield events, last


async def _find(store: Store, name: str) -> str:
    """The log of the episode or the run called `name`."""
    from aworld_runtime.names import episode_log, run_log

    if name != LAST and await store.last_seq(run_log(name)):
        return run_log(name)
    return episode_log((await find_episode(store, name)).id)


async def _from_store(store: Store, log: str, *, follow: bool) -> AsyncGenerator[Event]:
    import anyio

    from aworld_runtime.bus.base import read_all

    start = 1
    while True:
        for event in await read_all(store, log, start):
            start = event.seq + 1
            yield event
        if not follow:
            return
        await anyio.sleep(LOOK_AGAIN_S)


async def _each(events: list[Event]) -> AsyncGenerator[Event]:
    for event in events:
        yield event
