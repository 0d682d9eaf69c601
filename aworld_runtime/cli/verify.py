"""`aworld verify`: whether the store holds what the bus holds."""

from __future__ import annotations

import argparse
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from aworld_runtime.cli.own_types import add_program, own_types
from aworld_runtime.cli.shared import add_bus, add_json, add_store, joined_bus, run_async, stored
from aworld_runtime.errors import NotFoundError
from aworld_runtime.urls import shown

if TYPE_CHECKING:
    from aworld_runtime.cli.verdict import Verdict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compare the event ids of every log, bus against store. 1: they differ, or the store lacks events of a run"
        " that has ended. What it has not got yet of a run or an episode that goes on is counted as behind."
    )
    parser.add_argument("--log", default="", metavar="PREFIX", help="only logs that begin with it")
    add_program(parser)
    add_bus(parser)
    add_store(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    found = run_async(_compare, arguments)
    if arguments.json:
        print(found.model_dump_json())
    else:
        behind = f"{found.behind} behind, " if found.behind else ""
        print(
            f"{found.logs} logs, {found.events} events the same, {behind}{found.differing} differ;"
            f" only in the store: {found.archived_logs} logs, {found.archived_events} events"
        )
        for log in found.unfinished:
            print(f"{log} has no end, and the bus does not have it: nobody goes on with it")
        for one in found.differences:
            on_bus, in_store = one.on_bus or "(nothing)", one.in_store or "(nothing)"
            print(f"{one.log} seq {one.seq}: bus {on_bus}, store {in_store}")
    return 0 if found.same else 1


async def _compare(arguments: argparse.Namespace) -> Verdict:
    from aworld_runtime.cli.verdict import judge

    async with AsyncExitStack() as opened:
        types = opened.enter_context(own_types(arguments.program))
        bus = await opened.enter_async_context(joined_bus(arguments.bus))
        store = await opened.enter_async_context(stored(arguments.store))
        for log in await store.logs(arguments.log):
            await types.of(store, log)
        found = await judge(bus, store, arguments.log)
        if arguments.log and not found.logs:
            raise NotFoundError(
                f"no log begins with {arguments.log!r}, neither on {bus.url} nor in {shown(store.url)}:"
                " they are called run:RUN and episode:EPISODE"
            )
        return found
