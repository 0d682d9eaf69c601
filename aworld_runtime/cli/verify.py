"""`aworld verify`: whether the store holds what the bus holds."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from aworld_runtime.cli.shared import add_bus, add_json, add_store, joined_bus, run_async, stored

if TYPE_CHECKING:
    from aworld_runtime.nodes.verify import Comparison


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Compare the event ids of every log, bus against store. 1: they differ."
    parser.add_argument("--log", default="", metavar="PREFIX", help="only logs that begin with it")
    add_bus(parser)
    add_store(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    found = run_async(_compare, arguments)
    if arguments.json:
        print(found.model_dump_json())
    else:
        print(
            f"{found.logs} logs, {found.events} events the same, {found.differing} differ;"
            f" only in the store: {found.archived_logs} logs, {found.archived_events} events"
        )
        for one in found.differences:
            on_bus, in_store = one.on_bus or "(nothing)", one.in_store or "(nothing)"
            print(f"{one.log} seq {one.seq}: bus {on_bus}, store {in_store}")
    return 0 if found.same else 1


async def _compare(arguments: argparse.Namespace) -> Comparison:
    from aworld_runtime.nodes.verify import compare

    async with joined_bus(arguments.bus) as bus, stored(arguments.store) as store:
        return await compare(bus, store, arguments.log)
