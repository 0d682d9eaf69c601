"""`aworld import FILE`: an exported episode or run into a store."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from aworld_runtime.cli.own_types import add_program, own_types
from aworld_runtime.cli.shared import add_json, add_store, run_async


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Take an exported episode or run into a store. Everything in the file is checked before anything is written;"
        " importing it again changes nothing, and completes an import that was interrupted."
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="what aworld export wrote")
    add_program(parser)
    add_store(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    run_async(_import, arguments)
    return 0


async def _import(arguments: argparse.Namespace) -> None:
    from aworld_runtime.cli.progress import Progress
    from aworld_runtime.config import Settings
    from aworld_runtime.events import Registry
    from aworld_runtime.replay.exported import ExportedFile
    from aworld_runtime.replay.importing import put_into
    from aworld_runtime.store.open import open_store

    url = arguments.store or Settings.from_env().store
    with (
        own_types(arguments.program),
        ExportedFile(arguments.file, Registry()) as exported,
    ):
        await exported.check(Progress("checked"))
        async with open_store(url) as store:
            new = await put_into(store, exported, Progress("imported"))
    if arguments.json:
        print(json.dumps({**exported.manifest.summary, "new_events": new, "store": store.url}))
    else:
        print(f"{exported.manifest}, {new:,} of them new in {store.url}")
