"""`aworld run MODULE:ATTRIBUTE "question"`: one task, one answer."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from aworld_runtime.cli.shared import (
    add_breakpoints,
    add_bus,
    add_json,
    add_store,
    import_from_here,
    run_async,
)
from aworld_runtime.cli.streams import own_prints, printable
from aworld_runtime.errors import UsageError

if TYPE_CHECKING:
    from aworld_runtime.trajectory import Episode


UNSAID = logging.NullHandler()
"""Takes the owner's warning of a failed episode, which is this command's last line; whoever sets up logging hears it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Run an agent or a swarm on one task and print its answer."
    parser.epilog = 'example: aworld run my_project.agents:solver "What is 17 * 23?"'
    parser.add_argument("program", metavar="MODULE:ATTRIBUTE", help="an agent or a swarm")
    parser.add_argument("question", help="the task")
    parser.add_argument("--timeout", type=float, metavar="S", help="seconds after which it ends")
    add_slots(parser)
    parser.add_argument(
        "--debug", action="store_true", help="begin it paused, in the debugger, as aworld debug"
    )
    add_breakpoints(parser)
    add_bus(parser)
    add_store(parser)
    add_json(parser)


def add_slots(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--slots",
        type=int,
        default=1,
        help="episodes that this process runs; 0 leaves them to workers on the bus (default 1)",
    )


def expect_workers(arguments: argparse.Namespace) -> None:
    """See that somebody can run it: this process, or another.

    Raises:
        UsageError: nobody.
    """
    from aworld_runtime.config import Settings

    if arguments.slots < 0:
        raise UsageError(f"--slots {arguments.slots}: expected 0 or more")
    bus = arguments.bus or Settings.from_env().bus
    if not arguments.slots and bus.startswith("memory:"):
        raise UsageError(f"--slots 0 on {bus}: no other process can run it; give --bus redis://…")


def run(arguments: argparse.Namespace) -> int:
    from aworld_runtime.nodes.node import load_program

    expect_workers(arguments)
    logging.getLogger("aworld_runtime.nodes.owner").addHandler(UNSAID)
    import_from_here()
    with own_prints(apart=arguments.json):
        if arguments.slots:  # a wrong name is the caller's to mend, not an episode that failed
            load_program(arguments.program, {}, {})
    if arguments.debug or arguments.breakpoints:
        from aworld_runtime.cli.debug import debug_new

        return debug_new(arguments)
    with own_prints(apart=arguments.json):
        episode = run_async(_episode, arguments)
    if arguments.json:
        print(json.dumps(_summary(episode), ensure_ascii=False))
    elif episode.answer:
        print(printable(episode.answer, keep="\n\t") if sys.stdout.isatty() else episode.answer)
    if episode.reason == "answered":
        return 0
    why = f": {episode.error}" if episode.error else ""
    print(
        f"aworld: episode ended as {episode.reason}{printable(why)}; see it with: aworld log {episode.id}",
        file=sys.stderr,
    )
    return 1


async def _episode(arguments: argparse.Namespace) -> Episode:
    from aworld_runtime.runtime import Runtime

    async with Runtime(bus=arguments.bus, store=arguments.store, slots=arguments.slots) as runtime:
        with leaving_to_workers(runtime.bus.url):
            return await runtime.run(
                arguments.program, arguments.question, timeout_s=arguments.timeout
            )


@contextmanager
def leaving_to_workers(bus: str) -> Generator[None]:
    """Of an episode: say who goes on with it where the command is interrupted."""
    import anyio

    try:
        yield
    except anyio.get_cancelled_exc_class():
        if not bus.startswith("memory:"):
            print(
                f"aworld: interrupted; workers on {bus} go on with the episode. To end it: aworld cancel last --bus {bus}",
                file=sys.stderr,
            )
        raise


def _summary(episode: Episode) -> dict[str, object]:
    return {
        "episode": episode.id,
        "run": episode.run_id,
        "answer": episode.answer,
        "reason": episode.reason,
        "error": episode.error,
        "reward": episode.reward,
        "turns": sum(len(t.turns) for t in episode.trajectories),
        "tool_calls": episode.tool_calls,
        "usage": episode.usage.model_dump(),
    }
