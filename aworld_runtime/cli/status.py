"""`aworld status RUN`: one run at a glance."""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime

from aworld_runtime.cli.runs import counts_of, state
from aworld_runtime.cli.shared import LAST, add_json, add_store, find_run, run_async, stored


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Show how a run is doing: its episodes, and its latest metrics."
    parser.add_argument("run", nargs="?", default=LAST, metavar="RUN", help="default: the newest")
    add_store(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    run_async(_status, arguments)
    return 0


async def _status(arguments: argparse.Namespace) -> None:
    async with stored(arguments.store) as store:
        record = await find_run(store, arguments.run)
        found = await counts_of(store, record)
        metrics = await store.metrics(record.id)
    step, latest = metrics[-1] if metrics else (None, {})
    if arguments.json:
        status = {**record.model_dump(mode="json"), **found.model_dump(mode="json")}
        print(json.dumps({**status, "step": step, "metrics": latest}))
        return
    seconds = ((record.finished or datetime.now(UTC)) - record.started).total_seconds()
    print(f"run       {record.id} ({record.kind})")
    print(f"started   {record.started:%Y-%m-%d %H:%M:%S} UTC, {seconds:.0f} s")
    print(f"state     {state(record, found)}")
    print(f"episodes  {found}; takeovers {found.takeovers}")
    for reason, number in found.by_reason.items():
        print(f"          {reason} {number}")
    if step is not None:
        print(f"step      {step}")
        for name, value in sorted(latest.items()):
            print(f"          {name} {value:.6g}")
