"""`aworld replay EPISODE`: run the recorded handlers again and show the first difference."""

from __future__ import annotations

import argparse
import shutil
import time
from typing import TYPE_CHECKING

from aworld_runtime.cli.shared import (
    LAST,
    add_json,
    add_limit,
    add_store,
    check_limit,
    find_episode,
    find_run,
    import_from_here,
    run_async,
    stored,
)
from aworld_runtime.errors import AWorldError, NotFoundError, UsageError

if TYPE_CHECKING:
    from aworld_runtime.events import Registry
    from aworld_runtime.nodes.node import Program
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
        help="the agent or swarm, where the log names an object of another process",
    )
    add_store(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    if sum([bool(arguments.episodes), bool(arguments.run), arguments.all]) > 1:
        raise UsageError("give episodes, or --run, or --all: one of them")
    check_limit(arguments)
    import_from_here()
    return run_async(_replay_all, arguments)


async def _replay_all(arguments: argparse.Namespace) -> int:
    from aworld_runtime.events import Registry

    registry = Registry()
    reports: list[ReplayReport] = []
    unreadable: dict[str, str] = {}
    unnamed: list[str] = []
    start = time.perf_counter()
    async with stored(arguments.store, registry) as store:
        programs = Programs(store, registry, arguments.program)
        for episode in await _chosen(store, arguments):
            outcome: ReplayReport | str
            try:
                outcome = await programs.replay(episode)
                reports.append(outcome)
            except NeedsProgramError as error:
                unnamed.append(episode.id)
                outcome = f"needs --program module:attribute: {error}"
            except AWorldError as error:
                unreadable[episode.id] = f"{type(error).__name__}: {error}"
                outcome = f"unreadable: {unreadable[episode.id]}"
            if not arguments.json:
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


class NeedsProgramError(UsageError):
    """The log names a program that was an object inside the process that ran it."""


class Programs:
    """Loads what the logs name, each program once, and replays over it."""

    def __init__(self, store: Store, registry: Registry, given: str | None) -> None:
        self._store = store
        self._registry = registry
        self._given = given
        self._loaded: dict[str, Program] = {}

    async def replay(self, episode: EpisodeRecord) -> ReplayReport:
        from aworld_runtime.bus.base import read_all
        from aworld_runtime.events import EpisodeRequested
        from aworld_runtime.names import episode_log
        from aworld_runtime.replay.replay import replay

        reference = self._given or episode.program
        if not self._given and reference.startswith("local:"):
            raise NeedsProgramError("its program was an object of another process")
        self._import(reference)
        events = await read_all(self._store, episode_log(episode.id))
        request = events[0].data if events else None
        arguments = request.arguments if isinstance(request, EpisodeRequested) else {}
        key = f"{reference} {arguments}"
        if key not in self._loaded:
            from aworld_runtime.nodes.node import load_program

            self._loaded[key] = load_program(reference, arguments, {})
        return await replay(events, self._loaded[key])

    def _import(self, reference: str) -> None:
        """Import the program before its log is decoded: it may define event types."""
        from aworld_runtime.events import Registry
        from aworld_runtime.nodes.node import load

        load(reference)
        self._registry.types |= Registry().types


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
        print(f"{episode}  {outcome}")
        return
    size = f"{outcome.handlers} handlers, {outcome.events} events"
    if outcome.divergence is None:
        print(f"{episode}  identical, {size}")
        return
    divergence = outcome.divergence
    print(f"{episode}  DIFFERENT after {size}: {divergence.message}")
    columns = shutil.get_terminal_size((120, 24)).columns
    print(side_by_side(divergence.recorded, divergence.replayed, columns))


def side_by_side(recorded: str, replayed: str, width: int) -> str:
    """Two columns of the lines that differ, each cut to where it begins to."""
    import difflib
    from itertools import zip_longest

    column = max((width - 3) // 2, 20)
    left, right = recorded.splitlines(), replayed.splitlines()
    rows = [("RECORDED", "THIS TIME")]
    for tag, a, b, c, d in difflib.SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        if tag != "equal":
            rows += zip_longest(left[a:b], right[c:d], fillvalue="")
    return "\n".join(
        " │ ".join((one.ljust(column), two)).rstrip()
        for one, two in (_around_difference(row, column) for row in rows)
    )


def _around_difference(row: tuple[str, str], column: int) -> tuple[str, str]:
    if max(map(len, row)) <= column:
        return row
    pairs = enumerate(zip(*row, strict=False))
    same = next((i for i, (one, two) in pairs if one != two), min(map(len, row)))
    start = max(same - column // 3, 0)
    one, two = (_window(text, start, column) for text in row)
    return one, two


def _window(text: str, start: int, column: int) -> str:
    head = "…" if start and text else ""
    rest = text[start:]
    room = column - len(head)
    return head + (rest if len(rest) <= room else rest[: room - 1] + "…")


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
