"""`aworld runs`: the runs in the store, and the episodes of one."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from aworld_runtime.cli.shared import (
    add_json,
    add_limit,
    add_store,
    ago,
    check_limit,
    find_run,
    one_line,
    run_async,
    stored,
    table,
)
from aworld_runtime.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aworld_runtime.cli.counts import Counts
    from aworld_runtime.events import Event
    from aworld_runtime.store.base import EpisodeRecord, RunRecord, Store

ALL = 1_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "List the newest runs, or episodes: of one run, or of all."
    parser.add_argument("--run", metavar="RUN", help="the episodes of this run (or last)")
    parser.add_argument(
        "--episodes", action="store_true", help="the episodes of all runs, and those imported alone"
    )
    add_limit(parser, 20, "runs or episodes to list (default 20)")
    add_store(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    check_limit(arguments)
    if arguments.run and arguments.episodes:
        raise UsageError("give --run or --episodes: one of them")
    if arguments.episodes:
        run_async(_every_episode, arguments)
    else:
        run_async(_episodes if arguments.run else _runs, arguments)
    return 0


async def read_run(store: Store, record: RunRecord) -> tuple[list[Event], Counts]:
    """A run's log; what it asked for and what became of that."""
    from aworld_runtime.bus.base import read_all
    from aworld_runtime.cli.counts import count
    from aworld_runtime.names import run_log

    log = await read_all(store, run_log(record.id))
    return log, count(record, log, await store.episodes(run_id=record.id, limit=ALL))


def state(record: RunRecord, found: Counts) -> str:
    """How it ended; else when there was news of it: one that was killed could not say so."""
    if record.finished is not None:
        return record.reason or "done"
    return f"running, last news {ago(found.last_news)}"


async def _runs(arguments: argparse.Namespace) -> None:
    async with stored(arguments.store) as store:
        records = await store.runs(limit=arguments.limit)
        counts = [(await read_run(store, record))[1] for record in records]
    if arguments.json:
        for record, found in zip(records, counts, strict=True):
            print(json.dumps({**record.model_dump(mode="json"), **found.model_dump(mode="json")}))
        return
    rows = [
        (
            record.id,
            record.kind,
            f"{record.started:%Y-%m-%d %H:%M:%S}",
            state(record, found),
            found.requested,
            found.finished,
            found.takeovers,
            ", ".join(f"{reason} {number}" for reason, number in found.by_reason.items()),
        )
        for record, found in zip(records, counts, strict=True)
    ]
    head = (
        "RUN",
        "KIND",
        "STARTED (UTC)",
        "STATE",
        "REQUESTED",
        "FINISHED",
        "TAKEOVERS",
        "BY REASON",
    )
    print(table(head, rows) if rows else "no runs yet")


async def _episodes(arguments: argparse.Namespace) -> None:
    async with stored(arguments.store) as store:
        record = await find_run(store, arguments.run)
        episodes = await store.episodes(run_id=record.id, limit=arguments.limit)
        _, found = await read_run(store, record)
    if arguments.json:
        listed = [episode.model_dump(mode="json") for episode in episodes]
        print(json.dumps({"run": record.id, **found.model_dump(mode="json"), "episodes": listed}))
        return
    _tell([(episode, record) for episode in episodes], arguments.limit)
    print(f"run {record.id}: {found}")


async def _every_episode(arguments: argparse.Namespace) -> None:
    async with stored(arguments.store) as store:
        episodes = await store.episodes(limit=arguments.limit)
        runs = {run.id: run for run in await store.runs(limit=ALL)}
    if arguments.json:
        for episode in episodes:
            print(episode.model_dump_json())
        return
    _tell([(episode, runs.get(episode.run_id or "")) for episode in episodes], arguments.limit)
    if not episodes:
        print("no episodes yet")


def _tell(episodes: Sequence[tuple[EpisodeRecord, RunRecord | None]], limit: int) -> None:
    """A table of episodes, each with its run, where that is known."""
    head = ("EPISODE", "STATUS", "REWARD", "TURNS", "TOKENS", "TAKEOVERS", "SECONDS", "ANSWER")
    if episodes:
        print(table(head, [_row(episode, run) for episode, run in episodes]))
    if len(episodes) == limit:
        print(f"… the newest {limit}; --limit shows more")


def _row(episode: EpisodeRecord, run: RunRecord | None) -> tuple[object, ...]:
    from aworld_runtime.cli.counts import status

    seconds = "-"
    if episode.started and episode.finished:
        seconds = f"{(episode.finished - episode.started).total_seconds():.2f}"
    return (
        episode.id,
        status(episode, run),
        "-" if episode.reward is None else f"{episode.reward:.3f}",
        episode.turns,
        episode.usage.prompt_tokens + episode.usage.completion_tokens,
        episode.takeovers,
        seconds,
        one_line(episode.answer or episode.error or "", 60),
    )
