"""`aworld export EPISODE|RUN -o FILE`: all that it takes to replay it elsewhere, as one file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from aworld_runtime.cli.own_types import add_program, own_types
from aworld_runtime.cli.shared import LAST, add_json, add_store, find_log, run_async, stored

if TYPE_CHECKING:
    from aworld_runtime.replay.portable import Manifest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write an episode, or a run with all its episodes, into one file that `aworld import` takes into any store."
        " It is a zip with a line of JSON for each event."
    )
    parser.add_argument(
        "log",
        metavar="EPISODE|RUN",
        help=f"an episode (the beginning of its id will do), a run, or {LAST} (the newest episode)",
    )
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="FILE")
    parser.add_argument("--force", action="store_true", help="overwrite the file")
    add_program(parser)
    add_store(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    file: Path = arguments.output
    manifest = run_async(_export, arguments)
    size = file.stat().st_size
    if arguments.json:
        print(json.dumps({**manifest.summary, "bytes": size, "file": str(file)}))
    else:
        print(f"{manifest}, {size:,} bytes in {file}")
    return 0


async def _export(arguments: argparse.Namespace) -> Manifest:
    from aworld_runtime.cli.progress import Progress
    from aworld_runtime.replay.export import export

    with own_types(arguments.program) as types:
        async with stored(arguments.store) as store:
            log = await find_log(store, arguments.log)
            await types.of_all(store, log)
            tell = Progress("exported")
            return await export(store, log, arguments.output, force=arguments.force, tell=tell)
