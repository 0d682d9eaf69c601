"""`aworld replay EPISODE`: run the recorded handlers again and show the first difference."""

from __future__ import annotations

import argparse
import shutil
import time
from typing import TYPE_CHECKING

from aworld_runtime.cli.own_types import own_types
from aworld_runtime.cli.programs import NeedsProgramError, Programs
from aworld_runtime.cli.progress import Progress
from aworld_runtime.cli.shared import (
    LAST,
    add_breakpoints,
    add_json,
    add_limit,
    add_store,
    check_limit,
    counted,
    find_episode,
    find_run,
    run_async,
    stored,
)
from aworld_runtime.cli.side_by_side import explained
from aworld_runtime.cli.streams import own_prints, printable
from aworld_runtime.errors import AWorldError, NotFoundError, UsageError

if TYPE_CHECKING:
    from aworld_runtime.cli.own_types import OwnTypes
    from aworld_runtime.replay.replay import ReplayReport
    from aworld_runtime.store.base import EpisodeRecord, Store

ALL = 1_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run episodes again from their logs: the same code, the recorded answers, no live call."
        " Exit code 1 at a difference, 2 where a log can't be read."
    )
    parser.add_argument(
        "episodes",
        nargs="*",
        metavar="EPISODE",
        help="ids, or how they begin, or last (the newest; the default)",
    )
    parser.add_argument("--run", metavar="RUN", help="the episodes of this run (or last)")
    parser.add_argument("--all", action="store_true", help="every episode in the store")
    add_limit(parser, ALL, "with --run or --all: the newest N")
    parser.add_argument(
        "--program",
        metavar="MODULE:ATTRIBUTE",
        help="the agent or swarm, in place of the one that the log names; needed where that was an object in a script",
    )
    add_breakpoints(parser)
    add_store(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    if sum([bool(arguments.episodes), bool(arguments.run), arguments.all]) > 1:
        raise UsageError("give episodes, or --run, or --all: one of them")
    check_limit(arguments)
    if arguments.breakpoints:
        return _debug(arguments)
    return run_async(_replay_all, arguments)


def _debug(arguments: argparse.Namespace) -> int:
    from aworld_runtime.cli.debug import debug

    if arguments.run or arguments.all or len(arguments.episodes) > 1:
        raise UsageError("--break stops in one episode: name that")
    arguments.episode = next(iter(arguments.episodes), LAST)
    arguments.bus = "memory://"
    return debug(arguments, first="continue")


async def _replay_all(arguments: argparse.Namespace) -> int:
    with own_types(arguments.program) as types:
        return await _replay_each(arguments, types)


async def _replay_each(arguments: argparse.Namespace, types: OwnTypes) -> int:
    reports: list[ReplayReport] = []
    unreadable: dict[str, str] = {}
    unnamed: list[str] = []
    start = time.perf_counter()
    async with stored(arguments.store) as store:
        programs = Programs(store, types, arguments.program)
        tell = Progress("replayed")
        for episode in await _chosen(store, arguments):
            outcome: ReplayReport | str
            try:
                with own_prints(apart=arguments.json):
                    outcome = await programs.replay(episode)
                reports.append(outcome)
            except NeedsProgramError as error:
                unnamed.append(episode.id)
                outcome = f"needs --program module:attribute: {error}"
            except AWorldError as caught:
                error = types.explained(caught)
                unreadable[episode.id] = f"{type(error).__name__}: {error}"
                outcome = f"unreadable: {unreadable[episode.id]}"
            if arguments.json:
                tell(sum(report.events for report in reports))
            else:
                _show(episode.id, outcome)
    identical = sum(report.identical for report in reports)
    if arguments.json:
        _print_json(reports, unreadable, unnamed, seconds=time.perf_counter() - start)
    else:
        needs = f" needs --program {len(unnamed)}," if unnamed else ""
        print(
            f"identical {identical}, different {len(reports) - identical},"
            f" unreadable {len(unreadable)},{needs} live_calls {sum(r.live_calls for r in reports)}"
        )
    if unreadable or unnamed:
        return 2
    return 0 if identical == len(reports) else 1


async def _chosen(store: Store, arguments: argparse.Namespace) -> list[EpisodeRecord]:
    if arguments.all:
        found = await store.episodes(limit=arguments.limit)
    elif arguments.run:
        record = await find_run(store, arguments.run)
        found = await store.episodes(run_id=record.id, limit=arguments.limit)
    else:
        return [await find_episode(store, name) for name in arguments.episodes or [LAST]]
    if not found:
        raise NotFoundError(f"no episodes to replay in {store.url}")
    return found


def _show(episode: str, outcome: ReplayReport | str) -> None:
    if isinstance(outcome, str):
        print(f"{episode}  {printable(outcome)}")
        return
    size = f"{counted(outcome.handlers, 'handler')}, {counted(outcome.events, 'event')}"
    if not outcome.finished:
        size += ", and no end: the episode still runs, or the store has not got the rest"
    if outcome.divergence is None:
        print(f"{episode}  identical, {size}")
        return
    divergence = outcome.divergence
    print(f"{episode}  DIFFERENT after {size}: {printable(divergence.message)}")
    print(explained(divergence, shutil.get_terminal_size((120, 24)).columns))


def _print_json(
    reports: list[ReplayReport], unreadable: dict[str, str], unnamed: list[str], *, seconds: float
) -> None:
    import json

    identical = sum(report.identical for report in reports)
    print(
        json.dumps(
            {
                "identical": identical,
                "different": len(reports) - identical,
                "unreadable": unreadable,
                "needs_program": unnamed,
                "live_calls": sum(report.live_calls for report in reports),
                "seconds": round(seconds, 3),
                "episodes": [report.model_dump(mode="json") for report in reports],
            },
            ensure_ascii=False,
        )
    )
