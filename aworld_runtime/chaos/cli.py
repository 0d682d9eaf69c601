"""`aworld chaos`."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from aworld_runtime.chaos.plan import KINDS
from aworld_runtime.cli.shared import add_json, run_async
from aworld_runtime.errors import ConfigError, UsageError

DESCRIPTION = """\
Real workers, a real server and a real store, with faults drawn from a seed; then a check that nothing that was
acknowledged is lost, twice or out of order, and that every episode ended. Exits with 1 where it is not so."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument("--seconds", type=float, default=120.0, help="of faults (default 120)")
    parser.add_argument("--seed", type=int, default=0, help="of the schedule (default 0)")
    parser.add_argument(
        "--load", type=int, default=24, metavar="N", help="episodes at once (default 24)"
    )
    parser.add_argument("--faults", metavar="KIND,KIND", help="these kinds only (default: all)")
    parser.add_argument("--list", action="store_true", help="list the kinds of faults and exit")
    parser.add_argument(
        "--mongo-program",
        metavar="PROGRAM",
        default="mongod",
        help="server for the store (default: mongod if it is on the PATH, else SQLite)",
    )
    parser.add_argument(
        "--store", choices=("auto", "sqlite"), default="auto", help="sqlite: no Mongo server"
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="DIR",
        help="keep histories, logs and data there (default: kept on a violation, in a new folder)",
    )
    add_json(parser)


def chaos_command(arguments: argparse.Namespace) -> int:
    """Run `aworld chaos`; returns the exit code."""
    if arguments.list:
        for name, kind in KINDS.items():
            print(f"{name:<18} {kind.does}")
        return 0
    kinds = _kinds(arguments.faults)
    if arguments.seconds <= 0:
        raise UsageError(f"--seconds {arguments.seconds:g}: expected more than 0")
    if arguments.load < 1:
        raise UsageError(f"--load {arguments.load}: expected 1 or more")
    try:
        from aworld_runtime.chaos.report import text
        from aworld_runtime.chaos.run import Options, run
        from aworld_runtime.chaos.stage import find_mongo
    except ImportError as error:
        raise ConfigError(
            f"chaos needs the extra 'redis' ({error.name} is missing): pip install 'aworld-rt[redis]'"
        ) from error

    mongo = find_mongo(arguments.mongo_program) if arguments.store == "auto" else None
    if mongo is None and arguments.mongo_program != "mongod":
        raise UsageError(f"--mongo-program {arguments.mongo_program}: there is no such program")
    kept = arguments.keep
    if kept is not None and kept.exists() and any(kept.iterdir()):
        raise UsageError(f"--keep {kept}: it is not empty; name another folder")
    folder = (kept or Path(tempfile.mkdtemp(prefix="aworld-chaos-"))).resolve()
    options = Options(arguments.seconds, arguments.seed, kinds, folder, arguments.load, mongo)
    try:
        report = run_async(run, options, _say)
    except BaseException:
        _say(f"not finished; what there is: {folder}")
        raise
    print(report.model_dump_json() if arguments.json else text(report))
    if not report.ok or kept is not None:
        (folder / "result.json").write_text(report.model_dump_json(indent=2))
        _say(f"histories, logs and data: {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if report.ok else 1


def _kinds(listed: str | None) -> tuple[str, ...]:
    if listed is None:
        return tuple(KINDS)
    kinds = tuple(name.strip() for name in listed.split(",") if name.strip())
    for name in kinds:
        if name not in KINDS:
            raise UsageError(f"--faults: no kind {name!r}; there are: {', '.join(KINDS)}")
    return kinds


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
