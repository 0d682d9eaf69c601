"""What several commands need: shared flags, an opened store or bus, the user's own modules, tables."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple
from urllib.parse import urlsplit

from aworld_runtime.cli.streams import printable
from aworld_runtime.errors import ConfigError, NotFoundError, UsageError
from aworld_runtime.urls import shown

if TYPE_CHECKING:
    from aworld_runtime.bus.base import Bus
    from aworld_runtime.store.base import EpisodeRecord, RunRecord, Store

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
LAST = "last"
"""Names the newest run or episode."""
HOST = "127.0.0.1"
CANDIDATES = 6
"""Ids listed where several fit."""


def add_bus(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--bus", help="URL of the event bus: redis://… (default: $AWORLD_BUS, else memory://)"
    )


def add_store(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--store",
        help="URL of the store: sqlite:///… or mongodb://…"
        " (default: $AWORLD_STORE, else sqlite:///.aworld/aworld.db)",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_breakpoints(parser: argparse.ArgumentParser) -> None:
    """`arguments.breakpoints` are for the debugger."""
    parser.add_argument(
        "--break",
        dest="breakpoints",
        action="append",
        default=[],
        metavar="PREDICATE",
        help="stop at such events: 'type=tool.called and data.name=calculator'; repeatable",
    )


def add_health(parser: argparse.ArgumentParser, when: str = "") -> None:
    """`arguments.health` is where to `serve_health`, or None."""
    parser.add_argument(
        "--health",
        type=_address,
        metavar="[HOST:]PORT",
        help=f"{when}answer GET /healthz and /metrics there (host: {HOST})",
    )


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not port.isdigit() or not 0 <= int(port) < 2**16:
        raise UsageError(f"--health {text}: expected PORT or HOST:PORT")
    return host or HOST, int(port)


def add_limit(parser: argparse.ArgumentParser, default: int, text: str) -> None:
    parser.add_argument("--limit", type=int, default=default, metavar="N", help=text)


def check_limit(arguments: argparse.Namespace) -> None:
    """Of a command that has `--limit`.

    Raises:
        UsageError: less than one is wanted.
    """
    if arguments.limit < 1:
        raise UsageError(f"--limit {arguments.limit}: expected 1 or more")


def run_async(work: Callable[[*Ts], Coroutine[None, None, T]], *arguments: *Ts) -> T:
    """Run a command's asynchronous part. Ctrl-C cancels it, and is raised once it has cleaned up."""
    return asyncio.run(work(*arguments))


def import_from_here() -> None:
    """Let `module:attribute` name modules in the current folder, as `python -m` does."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)


@asynccontextmanager
async def stored(url: str | None) -> AsyncGenerator[Store]:
    """The store, for reading.

    Raises:
        NotFoundError: a SQLite file that isn't there; reading must not make one.
    """
    from aworld_runtime.config import Settings
    from aworld_runtime.store.open import open_store

    url = url or Settings.from_env().store
    if urlsplit(url).scheme == "sqlite":
        from aworld_runtime.store.sqlite import path_of

        if not path_of(url).exists():
            raise NotFoundError(
                f"no store at {url}: nothing has run here yet; name another with --store"
            )
    async with open_store(url) as store:
        yield store


@asynccontextmanager
async def joined_bus(url: str | None) -> AsyncGenerator[Bus]:
    """A bus that other processes share.

    Raises:
        ConfigError: none is named: `memory://` is inside one process.
    """
    from aworld_runtime.bus.open import open_bus
    from aworld_runtime.config import Settings

    settings = Settings.from_env()
    url = url or settings.bus
    if urlsplit(url).scheme == "memory":
        raise ConfigError(
            f"bus {url!r} is inside one process: give --bus redis://… (or set AWORLD_BUS)"
        )
    async with open_bus(url, keys=settings.bus_keys) as bus:
        yield bus


async def find_run(store: Store, name: str) -> RunRecord:
    """The run called `name`; `last` is the newest.

    Raises:
        NotFoundError: no such run.
    """
    runs = await store.runs(limit=1 if name == LAST else 100_000)
    for run in runs:
        if name in {run.id, LAST}:
            return run
    raise NotFoundError(f"no run {name!r} in {shown(store.url)}; list them with: aworld runs")


async def find_episode(store: Store, name: str) -> EpisodeRecord:
    """The episode called `name`, or whose id alone begins with it; `last` is the newest.

    Raises:
        NotFoundError: no such episode.
        UsageError: several begin with it.
    """
    found = (
        next(iter(await store.episodes(limit=1)), None)
        if name == LAST
        else await store.episode(name) or await _only_one(store, name)
    )
    if found is None:
        raise NotFoundError(
            f"no episode {name!r} in {shown(store.url)}; list them with: aworld runs --episodes"
        )
    return found


async def find_log(store: Store, name: str) -> str:
    """The log of the run or the episode called `name`; `last` is the newest episode's.

    Raises:
        NotFoundError: no such run or episode.
        UsageError: several begin with it.
    """
    from aworld_runtime.names import episode_log, run_log

    if name != LAST and await store.last_seq(run_log(name)):
        return run_log(name)
    return episode_log((await find_episode(store, name)).id)


async def _only_one(store: Store, prefix: str) -> EpisodeRecord | None:
    from aworld_runtime.names import episode_log, episode_of_log

    found = [episode_of_log(log) or "" for log in await store.logs(episode_log(prefix))]
    if len(found) > 1:
        more = ", …" if len(found) > CANDIDATES else ""
        listed = ", ".join(found[:CANDIDATES]) + more
        raise UsageError(f"{prefix!r} begins the ids of {len(found)} episodes: {listed}")
    return await store.episode(found[0]) if found else None


def tell_outcomes(
    outcomes: Mapping[str, str], *, of: str, done: str, as_json: bool, **common: str
) -> int:
    """A line for each id of a command's objects, with what became of it; the exit code: 1 where one isn't `done`.

    In JSON the id is called `of`, and has `common` before it.
    """
    for name, outcome in outcomes.items():
        fields = {**common, of: name, "outcome": outcome}
        print(json.dumps(fields) if as_json else f"{name}  {outcome}")
    return 0 if set(outcomes.values()) <= {done} else 1


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as they need to be; the last one ends where it ends."""
    lines = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def ago(moment: datetime) -> str:
    """How long it has been, as one says it."""
    return f"{span(max((datetime.now(UTC) - moment).total_seconds(), 0))} ago"


def span(seconds: float) -> str:
    """So many seconds, in the unit that one would say them in."""
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def counted(count: int, of: str) -> str:
    """`1 event`, `2 events`."""
    return f"{count:,} {of}{'' if count == 1 else 's'}"


def one_line(text: str, width: int) -> str:
    """`text` on one line of at most `width` characters, none of which a terminal obeys."""
    text = printable(" ".join(text.split()))
    return text if len(text) <= width else text[: width - 1] + "…"
