"""`aworld log EPISODE`: what happened, as a tree or event by event. Of the program it imports the event types, and runs nothing."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from aworld_runtime.cli.own_types import add_program, own_types
from aworld_runtime.cli.screen import PIPE_WIDTH, PLAIN, Line, Look, Screen
from aworld_runtime.cli.shared import (
    LAST,
    add_bus,
    add_json,
    add_store,
    ago,
    find_log,
    find_run,
    joined_bus,
    run_async,
    stored,
)
from aworld_runtime.errors import NotFoundError
from aworld_runtime.names import episode_of_log

if TYPE_CHECKING:
    from datetime import datetime

    from aworld_runtime.cli.own_types import OwnTypes
    from aworld_runtime.events import Event
    from aworld_runtime.store.base import Store

LOOK_AGAIN_S = 0.2
"""A store tells nobody that it has grown, so following one in another process means looking."""
FRAME_S = 0.1
"""How often what goes on is drawn again."""
NARROWEST = 60
ROLE = 12
TYPE = 20
"""Columns, wide enough for nearly all; a log is shown while it grows, so what comes later isn't known."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Show what happened in an episode: its agents, their turns and tool calls, what each was asked by whom, and how long"
        " it took. Each line begins with a seq in the log and the seconds since the start. A run's log is shown event by"
        " event."
    )
    parser.add_argument(
        "log",
        nargs="?",
        default=LAST,
        metavar="EPISODE",
        help="an episode (the beginning of its id will do), a run, or last (the newest episode; the default)",
    )
    parser.add_argument(
        "--follow", action="store_true", help="go on until it ends; what runs is shown as it runs"
    )
    parser.add_argument("--events", action="store_true", help="event by event")
    parser.add_argument("--all", action="store_true", help="--events, with delivery.handled, too")
    parser.add_argument(
        "--where",
        metavar="PREDICATE",
        help="--events, but only these: 'type=tool.called and data.name=calculator'",
    )
    add_program(parser)
    add_bus(parser)
    add_store(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    run_async(_log, arguments)
    return 0


async def _log(arguments: argparse.Namespace) -> None:
    with own_types(arguments.program) as types:
        await _print(arguments, types)


async def _print(arguments: argparse.Namespace, types: OwnTypes) -> None:
    by_event = arguments.events or arguments.all or arguments.where or arguments.json
    async with _events(arguments, types) as (store, name, events, last):
        growing = _until_its_end(events, last) if arguments.follow else events
        look = Look.of(sys.stdout)
        if by_event or episode_of_log(name) is None:
            await _list(arguments, growing, look)
        elif arguments.follow:
            await _follow(growing, look)
        else:
            await _show(growing, look, store)


async def _until_its_end(events: AsyncIterator[Event], last: int) -> AsyncGenerator[Event]:
    """The events of a log that grows, up to its last; it has had `last` when it was found."""
    ended = False
    async for event in events:
        yield event
        if event.type in {"episode.finished", "run.finished"}:
            ended = True
        elif event.type == "run.taken_over":  # resumed
            ended = False
        if ended and event.seq >= last:
            return


# --- event by event ------------------------------------------------------------------------------------------------


async def _list(arguments: argparse.Namespace, events: AsyncIterator[Event], look: Look) -> None:
    from aworld_runtime.predicate import Predicate

    where = Predicate.parse(arguments.where) if arguments.where else None
    layout = Layout(shutil.get_terminal_size((PIPE_WIDTH, 24)).columns, look)
    async for event in events:
        layout.note(event)
        wanted = arguments.all or arguments.json or event.type != "delivery.handled"
        if where.matches(event) if where else wanted:
            print(_json(event) if arguments.json else layout.line(event), flush=arguments.follow)


def _json(event: Event) -> str:
    fields = event.model_dump_json(exclude_defaults=True)
    return f'{{"seq":{event.seq},{fields[1:]}'


class Layout:
    """Lays a log out in columns.

    Mail is older than its place in the log: it is shown at the time of what stands before it, so that time never runs back.
    """

    def __init__(self, width: int, look: Look) -> None:
        self._width = max(width, NARROWEST)
        self._look = look
        self._began: datetime | None = None
        self._now: datetime | None = None

    def note(self, event: Event) -> None:
        """To be told of every event."""
        self._began = self._began or event.time
        self._now = max(self._now or event.time, event.time)

    def line(self, event: Event) -> str:
        """The event that it was told of last."""
        from aworld_runtime.cli.gist import gist

        began, now = self._began or event.time, self._now or event.time
        offset = (now - began).total_seconds()
        start = f"{event.seq:>5} {offset:>9.3f}  {event.role:<{ROLE}}  {event.type:<{TYPE}}  "
        room = max(self._width - len(start), NARROWEST // 2)
        return self._look.safe(start) + self._look.fit(gist(event), room)


# --- as a tree -----------------------------------------------------------------------------------------------------


async def _show(events: AsyncIterator[Event], look: Look, store: Store) -> None:
    """A log as it is now, each agent's turns together."""
    from aworld_runtime.cli.tree import Tree
    from aworld_runtime.timeline import Timeline, by_work

    screen, tree, timeline = Screen(sys.stdout, look), Tree(look), Timeline()
    width, _ = screen.size
    entries = by_work([entry async for event in events for entry in timeline.add(event)])
    lines = [line for entry in entries for line in tree.settled(entry, timeline.totals, width)]
    if timeline.finished is None and timeline.last is not None:
        lines += tree.going_on(timeline, timeline.last, width)
        more = "--follow waits for more"
        if await _is_left(store, timeline.requested):
            more = "its run has ended, and only a worker on a bus would go on with it"
        news = f"This was {ago(timeline.last)}, and is the last that is known; {more}."
        lines.append([(news, PLAIN)])
    screen.write(lines)


async def _is_left(store: Store, requested: Event | None) -> bool:
    """Whether the run of an episode that has no end has one."""
    try:
        run = await find_run(store, (requested and requested.run_id) or "")
    except NotFoundError:
        return False
    return run.finished is not None


async def _follow(events: AsyncIterator[Event], look: Look) -> None:
    """A log as it grows: what is settled stays, what goes on is drawn again."""
    import anyio

    from aworld_runtime.cli.tree import Tree
    from aworld_runtime.events import utc_now
    from aworld_runtime.timeline import Timeline

    screen, tree, timeline = Screen(sys.stdout, look), Tree(look), Timeline()
    settled: list[Line] = []
    done = anyio.Event()

    async def read() -> None:
        async for event in events:
            for entry in timeline.add(event):
                settled.extend(tree.settled(entry, timeline.totals, screen.size[0]))
        done.set()

    def draw() -> None:
        now = max(timeline.last or utc_now(), utc_now())
        screen.write(settled, tree.going_on(timeline, now, screen.size[0]))
        settled.clear()

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            while not done.is_set():
                draw()
                with anyio.move_on_after(FRAME_S):
                    await done.wait()
        draw()
    finally:
        screen.close()


# --- the log -------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _events(
    arguments: argparse.Namespace, types: OwnTypes
) -> AsyncGenerator[tuple[Store, str, AsyncIterator[Event], int]]:
    """The store, the log's name, its events, and its last seq now: from a server's bus where one is named, else from the store."""
    from aworld_runtime.archive.logs import Logs
    from aworld_runtime.config import Settings
    from aworld_runtime.names import episode_log, run_log

    async with stored(arguments.store) as store:
        bus_url = arguments.bus or Settings.from_env().bus
        if urlsplit(bus_url).scheme == "memory":
            name = await find_log(store, arguments.log)
            await types.of(store, name)
            last = await store.last_seq(name)
            yield store, name, _from_store(store, name, follow=arguments.follow), last
            return
        async with joined_bus(bus_url) as bus:
            logs = Logs(bus, store)
            names = (
                []
                if arguments.log == LAST
                else [episode_log(arguments.log), run_log(arguments.log)]
            )
            there = [name for name in names if await logs.last_seq(name)]
            name = there[0] if there else await find_log(store, arguments.log)
            await types.of(logs, name)
            last = await logs.last_seq(name)
            if not arguments.follow:
                yield store, name, _each(await logs.read_all(name)), last
                return
            async with logs.tail(name) as events:
                yield store, name, events, last


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
