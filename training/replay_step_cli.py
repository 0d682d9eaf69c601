"""`aworld replay-step RUN`."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from aworld_runtime.cli.shared import (
    LAST,
    add_json,
    add_store,
    find_run,
    import_from_here,
    run_async,
    stored,
    table,
)
from aworld_runtime.errors import AWorldError, NotFoundError, UnknownTaskError, UsageError
from aworld_runtime.training.extra import importing_train_extra

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from aworld_runtime.store.base import RunRecord, Store
    from aworld_runtime.training.recorded_run import RecordedRun, RecordedStep
    from aworld_runtime.training.step_comparison import StepComparison

DESCRIPTION = """\
Take steps of a training run again, from its record alone: the batch from the logs of its episodes, the weights before it
from a checkpoint or the model that training began with. Rows, advantages, loss and gradient are compared with what was
recorded then. Nothing is written. Exit code 1 where something differs, 2 where a step can't be rebuilt."""
EXAMPLES = """\
examples:
  aworld replay-step last                  the newest training run's last step
  aworld replay-step RUN --step 3
  aworld replay-step RUN --all --json      every step, from the first
  aworld replay-step RUN --folder /mnt/runs/RUN --model /mnt/models/mine    where they were moved
"""

RUNS = 100_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run", nargs="?", default=LAST, metavar="RUN", help="its id, or last")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="this step (default: the last)")
    which.add_argument("--all", action="store_true", help="every step, from the first")
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="the run's folder, if it was moved"
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="the model that training began with, if it was moved",
    )
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="processes of the learner (default: as many as then)"
    )
    add_store(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run `aworld replay-step`; returns the exit code."""
    if arguments.step is not None and arguments.step < 1:
        raise UsageError(f"--step {arguments.step}: the first step is 1")
    if arguments.ranks is not None and arguments.ranks < 1:
        raise UsageError(f"--ranks {arguments.ranks}: expected 1 or more")
    import_from_here()
    found: list[StepComparison] = []
    try:
        for comparison in _comparisons(arguments):
            found.append(comparison)
            if not arguments.json:
                briefly = arguments.all and comparison.identical
                print(_line(comparison) if briefly else _text(comparison), flush=True)
    except AWorldError as error:  # a step can't be rebuilt, so there is nothing to compare
        print(f"aworld: error: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        _print_json(found)
    return 0 if all(comparison.identical for comparison in found) else 1


def _comparisons(arguments: argparse.Namespace) -> Iterator[StepComparison]:
    with importing_train_extra():
        from aworld_runtime.training.replay_step import replaying
    run = run_async(_read_run, arguments)
    last = arguments.step or run.last
    wanted = run_async(_read_step, arguments, run, last)  # what is missing is said at once
    first = 1 if arguments.all else last
    start = run.start_of(first, arguments.folder)
    moved = {"folder": arguments.folder, "model": arguments.model}
    with replaying(run, start, **moved, ranks=arguments.ranks) as replay:
        while (number := replay.next) <= last:
            step = wanted if number == last else run_async(_read_step, arguments, run, number)
            # Outside of any event loop, so that Ctrl-C ends it at once.
            rebuilt = replay.take(step)
            if number >= first:
                yield rebuilt.comparison


async def _read_run(arguments: argparse.Namespace) -> RecordedRun:
    from aworld_runtime.training.recorded_run import RecordedRun
    from aworld_runtime.training.task import find_task

    async with stored(arguments.store) as store:
        record = await _find_training(store, arguments.run)
    with suppress(UnknownTaskError):  # it need not be here; if it is, it may define event types
        find_task(str(record.config.get("task")))
    async with stored(arguments.store) as store:
        return await RecordedRun.read(store, record.id)


async def _find_training(store: Store, name: str) -> RunRecord:
    if name != LAST:
        return await find_run(store, name)
    for record in await store.runs(limit=RUNS):
        if record.kind == "train":
            return record
    raise NotFoundError(f"no training run in {store.url}; start one with: aworld train")


async def _read_step(arguments: argparse.Namespace, run: RecordedRun, number: int) -> RecordedStep:
    async with stored(arguments.store) as store:
        return await run.step(store, number)


def _line(comparison: StepComparison) -> str:
    return f"step {comparison.step}: {_verdict(comparison)}"


def _verdict(comparison: StepComparison) -> str:
    if (first := comparison.first) is not None:
        return f"DIFFERENT in {first.name}"
    if all(one.verdict != "close" for one in comparison.quantities):
        return "identical"
    return f"the same within {comparison.tolerance:g}"


def _text(comparison: StepComparison) -> str:
    lines = [
        f"run {comparison.run}, {_line(comparison)}",
        f"weights before it: {comparison.weights}",
    ]
    if comparison.other:
        lines.append(f"computed then with {'; '.join(comparison.other)}")
    if (first := comparison.first) is not None:
        lines += [
            f"first difference: {first.name}: {first.difference}",
            f"likely cause: {first.cause}",
        ]
    quantities = [
        (
            one.name,
            _number(one.recorded),
            _number(one.rebuilt),
            f"{one.verdict}: {one.differing}" if one.differing else one.verdict,
        )
        for one in comparison.quantities
    ]
    groups = [
        (group.group, _numbers(group.rewards), _numbers(group.advantages))
        for group in comparison.groups
    ]
    return "\n".join(
        [
            *lines,
            "",
            table(("QUANTITY", "RECORDED", "REBUILT", ""), quantities),
            "",
            table(("GROUP", "REWARDS", "ADVANTAGES"), groups),
            "",
        ]
    )


def _number(value: float | None) -> str:
    """All its digits: what differs must look different."""
    if value is None:
        return "–"
    return f"{value:.0f}" if float(value).is_integer() and abs(value) < 1e15 else repr(value)


def _numbers(values: Sequence[float]) -> str:
    return " ".join(f"{value:.3g}" for value in values)


def _print_json(found: Sequence[StepComparison]) -> None:
    identical = sum(comparison.identical for comparison in found)
    steps = [
        {"identical": comparison.identical, **comparison.model_dump(mode="json")}
        for comparison in found
    ]
    print(json.dumps({"identical": identical, "different": len(found) - identical, "steps": steps}))
