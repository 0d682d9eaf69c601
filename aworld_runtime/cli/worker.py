"""`aworld worker --bus URL`: this process's share of the episodes, and of the tools.

SIGTERM, SIGINT ──▶ drain: take no more, end what runs, leave
once more       ──▶ leave now; others take the episodes over, and make the calls again
"""

from __future__ import annotations

import argparse
import logging
import signal
from typing import TYPE_CHECKING

from aworld_runtime import telemetry
from aworld_runtime.cli.shared import add_bus, add_health, import_from_here, joined_bus, run_async
from aworld_runtime.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from anyio.abc import TaskGroup

    from aworld_runtime.bus.base import Bus
    from aworld_runtime.nodes.tool_worker import ToolWorker
    from aworld_runtime.nodes.worker import Worker
    from aworld_runtime.tools.base import BaseTool

logger = logging.getLogger(__name__)

LOG_LEVEL = "info"
INTERRUPTED = 130
"""Exit code of who was told twice."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run episodes and tools for a bus until SIGTERM or Ctrl-C: what runs then is ended, and the exit code is 0; a"
        " second one ends it now. Exit code 1 where the bus stayed away for longer than its outage_s."
    )
    parser.add_argument(
        "--slots", type=int, default=8, help="episodes at once (default 8); 0: tools alone"
    )
    parser.add_argument("--name", help="as lists and logs call it (default: host and process id)")
    parser.add_argument(
        "--tools",
        action="append",
        default=[],
        metavar="MODULE:ATTRIBUTE",
        help="also serve a tool, a function or a list of them to episodes elsewhere; repeatable",
    )
    add_health(parser)
    add_bus(parser)
    parser.epilog = (
        "example: aworld worker --bus redis://host:6379 --slots 16 --health 9100; tools alone: aworld worker --bus"
        " redis://host:6379 --slots 0 --tools my_project.tools:search"
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.slots < (0 if arguments.tools else 1):
        raise UsageError(f"--slots {arguments.slots}: expected 1 or more, or 0 with --tools")
    import_from_here()
    arguments.name = arguments.name or _name()
    with telemetry.about(worker=arguments.name):
        return run_async(_serve, arguments)


async def _serve(arguments: argparse.Namespace) -> int:
    import anyio

    from aworld_runtime.cli.health import serve_health
    from aworld_runtime.config import Settings
    from aworld_runtime.nodes.stall import tell_of_stalls
    from aworld_runtime.nodes.tool_worker import ToolWorker
    from aworld_runtime.nodes.worker import Worker, check_version
    from aworld_runtime.version import code_version

    tools = _tools(arguments.tools)
    stop = Stop()
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with joined_bus(arguments.bus) as bus, anyio.create_task_group() as tasks:
            await check_version(bus, code_version())
            await _look_for_namesakes(bus, arguments.name)
            tasks.start_soon(tell_of_stalls, f"worker {arguments.name}")
            served = ToolWorker(bus, tools, name=arguments.name, version=code_version())
            worker = None
            if arguments.slots:
                worker = Worker(
                    bus,
                    name=arguments.name,
                    slots=arguments.slots,
                    version=code_version(),
                    models=Settings.from_env().llm,
                )
            tasks.start_soon(stop.wait, signals, worker or served, tasks)
            if arguments.health is not None:
                await tasks.start(serve_health, arguments.health, (worker or served).health)
            logger.info(
                "worker %s on %s: %d slots, tools: %s",
                arguments.name,
                bus.url,
                arguments.slots,
                ", ".join(tools) or "those of its episodes",
            )
            async with anyio.create_task_group() as serving:
                serving.start_soon(served.run)
                if worker is not None:
                    await worker.run()
                    served.drain()  # not sooner: its own episodes may call them
            tasks.cancel_scope.cancel()
    return stop.code


async def _look_for_namesakes(bus: Bus, name: str) -> None:
    """Log lines, traces and events name their worker. A warning: it may be what a crash has left, gone in 5 s."""
    for node in await bus.nodes():
        if node.name.partition("/")[2] == name:
            logger.warning(
                "%s is on the bus already (host %s, pid %d): if it runs, nothing but the process id tells the two apart;"
                " give one another --name",
                node.name,
                node.host,
                node.pid,
            )
            return


class Stop:
    """Turns signals into drain, then into leaving at once."""

    def __init__(self) -> None:
        self.code = 0

    async def wait(
        self, signals: AsyncIterator[signal.Signals], worker: Worker | ToolWorker, tasks: TaskGroup
    ) -> None:
        async for _ in signals:
            if worker.draining:
                self.code = INTERRUPTED
                tasks.cancel_scope.cancel()
                return
            logger.info(
                "worker %s: draining %d in hand; once more to leave now",
                worker.name,
                worker.running,
            )
            worker.drain()


def _tools(references: list[str]) -> Mapping[str, BaseTool]:
    """The tools that `--tools` names.

    Raises:
        UnknownProgramError: a reference that can't be imported.
        UsageError: it names no tools.
    """
    from aworld_runtime.errors import ToolError
    from aworld_runtime.nodes.node import load
    from aworld_runtime.tools.registry import resolve

    given: list[object] = []
    for reference in references:
        found = load(reference)
        given += found if isinstance(found, list | tuple) else [found]
    try:
        return resolve(given)  # pyright: ignore[reportArgumentType] - it says itself what isn't a tool
    except (ToolError, TypeError) as error:
        raise UsageError(f"--tools {' '.join(references)}: {error}") from error


def _name() -> str:
    import os
    import socket

    return f"{socket.gethostname()}-{os.getpid()}"
