"""`aworld status RUN`: one run at a glance."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from aworld_runtime.cli.runs import read_run, state
from aworld_runtime.cli.shared import LAST, add_json, add_store, find_run, run_async, stored, table

if TYPE_CHECKING:
    from aworld_runtime.events import EvaluationFinished, Event

SHOWN = {
    "reward/mean": "of the episodes trained on",
    "actor/loss": "",
    "actor/logprob_gap": "learner's logprobs less the sampler's: near 0, or something is wrong",
    "perf/step_s": "seconds",
    "batch/tokens": "trained on",
}
"""What says how a run is doing; the other metrics explain it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Show how a run is doing: its episodes, and how it learns."
    parser.add_argument("run", nargs="?", default=LAST, metavar="RUN", help="default: the newest")
    add_store(parser)
    parser.add_argument("--all", action="store_true", help="every metric of the latest step")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    run_async(_status, arguments)
    return 0


async def _status(arguments: argparse.Namespace) -> None:
    async with stored(arguments.store) as store:
        record = await find_run(store, arguments.run)
        log, found = await read_run(store, record)
        metrics = await store.metrics(record.id)
    step, latest = metrics[-1] if metrics else (None, {})
    evaluation = _newest_evaluation(log)
    if arguments.json:
        status = {**record.model_dump(mode="json"), **found.model_dump(mode="json")}
        held_out = evaluation.model_dump(mode="json") if evaluation else None
        print(json.dumps({**status, "step": step, "metrics": latest, "evaluation": held_out}))
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
    rows = [(name, f"{latest[name]:.6g}", said) for name, said in SHOWN.items() if name in latest]
    if evaluation is not None and "reward/mean" in evaluation.metrics:
        said = f"of the held-out episodes, after step {evaluation.step}"
        rows.insert(0, ("reward/mean", f"{evaluation.metrics['reward/mean']:.6g}", said))
    others = sorted(latest.keys() - SHOWN)
    if arguments.all:
        rows += [(name, f"{latest[name]:.6g}", "") for name in others]
    if rows:
        print(table(("METRIC", "VALUE", ""), rows))
    if others and not arguments.all:
        print(f"… {len(others)} more with --all")


def _newest_evaluation(log: Sequence[Event]) -> EvaluationFinished | None:
    from aworld_runtime.events import EvaluationFinished

    found = (event.data for event in reversed(log) if isinstance(event.data, EvaluationFinished))
    return next(found, None)
