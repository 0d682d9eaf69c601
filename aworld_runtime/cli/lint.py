"""`aworld lint [PATH…]`: what in agents and swarms a replay can't repeat."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from aworld_runtime.cli.shared import add_json, counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Find what a replay can't repeat in the source of agents and swarms: the clock, random numbers, direct network"
        " use, sleeping, and the order of sets. Tools, models and environments may use all of that. Nothing is run."
        " Exit code 1 where something is found."
    )
    parser.add_argument(
        "paths",
        nargs="*",
        type=Path,
        default=[Path()],
        metavar="PATH",
        help="files, or folders, of which those files are read that import aworld_runtime, and what these import"
        " (default: this folder)",
    )
    add_json(parser)
    parser.epilog = "a line that must stay as it is says why: # aworld: allow REASON"


def run(arguments: argparse.Namespace) -> int:
    from aworld_runtime.replay.lint import ADVICE, lint

    findings, files = lint(arguments.paths)
    if arguments.json:
        found = [{**f.model_dump(mode="json"), "advice": ADVICE[f.rule]} for f in findings]
        print(json.dumps({"files": files, "findings": found}))
    else:
        for finding in findings:
            print(finding)
        print(f"{len(findings)} found in {counted(files, 'file')}")
    return 1 if findings else 0
