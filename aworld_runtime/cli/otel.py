"""`aworld otel`: an episode's log as OpenTelemetry spans, sent to a collector."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import TYPE_CHECKING

from aworld_runtime.cli.own_types import add_program, own_types
from aworld_runtime.cli.shared import (
    LAST,
    add_bus,
    add_health,
    add_json,
    add_store,
    find_episode,
    joined_bus,
    run_async,
    stored,
)
from aworld_runtime.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    from aworld_runtime.bus.base import Bus
    from aworld_runtime.cli.own_types import OwnTypes
    from aworld_runtime.store.base import Store
    from aworld_runtime.tracing.export import Exporter
    from aworld_runtime.tracing.otlp import Collector

logger = logging.getLogger(__name__)

LOG_LEVEL = "info"
ENDPOINT = "http://localhost:4318/v1/traces"
CURSOR = ".aworld/otel.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Send episodes to an OpenTelemetry collector, as spans with the conventions for generative AI: agents, completions,"
        " tool calls. Without --bus they are read from the store."
    )
    parser.add_argument(
        "--endpoint", default=ENDPOINT, metavar="URL", help=f"OTLP over HTTP (default {ENDPOINT})"
    )
    parser.add_argument(
        "--episode", metavar="EPISODE", help="this one alone (or last); default all"
    )
    parser.add_argument(
        "--follow",
        action="store_true",
        help="go on with what the bus brings; begins where it was when it was last ended",
    )
    parser.add_argument(
        "--cursor",
        type=Path,
        default=Path(CURSOR),
        metavar="FILE",
        help=f"where --follow keeps how far it has come (default {CURSOR})",
    )
    parser.add_argument(
        "--content", action="store_true", help="also what was said: prompts, answers, errors"
    )
    add_health(parser, "with --follow, ")
    add_program(parser)
    add_bus(parser)
    add_store(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.follow and arguments.episode:
        raise UsageError("--follow takes all episodes: give it without --episode")
    if arguments.health and not arguments.follow:
        raise UsageError("--health: give it with --follow; without, the export ends by itself")
    episodes, exporter = run_async(_export, arguments)
    sent, endpoint = exporter.sent, exporter.sink.endpoint
    if arguments.json:
        print(json.dumps({"episodes": episodes, "spans": sent, "endpoint": endpoint}))
    else:
        print(f"{sent} spans of {episodes} episodes sent to {endpoint}")
    return 0


async def _export(arguments: argparse.Namespace) -> tuple[int, Exporter]:
    """How many episodes were sent, and by whom."""
    from aworld_runtime.tracing.otlp import Collector

    with own_types(arguments.program) as types, closing(Collector(arguments.endpoint)) as collector:
        return await _export_to(collector, arguments, types)


async def _export_to(
    collector: Collector, arguments: argparse.Namespace, types: OwnTypes
) -> tuple[int, Exporter]:
    from aworld_runtime.archive.logs import Logs
    from aworld_runtime.tracing.export import Exporter

    async with _sources(arguments) as (bus, store):
        logs = Logs(bus, store) if bus and store else bus or store
        if logs is None:
            raise UsageError("nothing to read from: give --bus or --store")
        exporter = Exporter(types.reading(logs), collector, content=arguments.content)
        if bus is not None and arguments.follow:
            await _follow(arguments, exporter, bus)
        names = await _logs(arguments.episode, bus, store)
        for log in names:
            await exporter.export(log)
        return len(names), exporter


@asynccontextmanager
async def _sources(
    arguments: argparse.Namespace,
) -> AsyncGenerator[tuple[Bus | None, Store | None]]:
    """The bus where one is asked for, and the store where it is named or there is no bus."""
    with_bus = arguments.bus is not None or arguments.follow
    async with AsyncExitStack() as opened:
        bus = await opened.enter_async_context(joined_bus(arguments.bus)) if with_bus else None
        store = None
        if bus is None or arguments.store is not None:
            store = await opened.enter_async_context(stored(arguments.store))
        yield bus, store


async def _follow(arguments: argparse.Namespace, exporter: Exporter, bus: Bus) -> None:
    """Until cancelled."""
    import anyio

    from aworld_runtime.cli.health import serve_health
    from aworld_runtime.tracing.export import CursorFile

    async with anyio.create_task_group() as tasks:
        if arguments.health is not None:
            await tasks.start(
                serve_health,
                arguments.health,
                lambda: {"status": "ok", "endpoint": exporter.sink.endpoint, "sent": exporter.sent},
            )
        logger.info("spans of %s go to %s", bus.url, exporter.sink.endpoint)
        await exporter.follow(bus, CursorFile(arguments.cursor))


async def _logs(episode: str | None, bus: Bus | None, store: Store | None) -> list[str]:
    """The logs of the episodes that are asked for.

    Raises:
        NotFoundError: there is no such episode.
        UsageError: several ids begin so.
    """
    from aworld_runtime.names import episode_log

    if episode is None:
        names = dict.fromkeys(await _on_bus(bus) if bus else ())
        names |= dict.fromkeys(await store.logs(episode_log("")) if store else ())
        return list(names)
    if bus is not None and await bus.last_seq(episode_log(episode)):
        return [episode_log(episode)]
    if store is not None:
        return [episode_log((await find_episode(store, episode)).id)]
    found = await _on_bus(bus) if bus else []
    found = (
        found[-1:] if episode == LAST else [n for n in found if n.startswith(episode_log(episode))]
    )
    if len(found) > 1:
        raise UsageError(f"{episode!r} begins the ids of {len(found)} episodes on the bus")
    if not found:
        raise NotFoundError(
            f"no episode {episode!r} on the bus, which lets go what is in the store: name that, too, with --store"
        )
    return found


async def _on_bus(bus: Bus) -> list[str]:
    """The logs of the episodes that the feed tells of, in the order in which they began."""
    from aworld_runtime.archive.marker import feed_so_far
    from aworld_runtime.names import episode_of_log

    begun: dict[str, None] = {}
    older: dict[str, None] = {}
    """The feed has been trimmed beyond their beginning."""
    async for entry in feed_so_far(bus):
        if episode_of_log(entry.log) is not None:
            (begun if entry.first == 1 else older)[entry.log] = None
    return [*(log for log in older if log not in begun), *begun]
