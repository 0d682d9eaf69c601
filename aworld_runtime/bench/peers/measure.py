"""What the peers' scripts share: arguments, messages, and the clock. Standard library and pydantic alone."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from pydantic import BaseModel

TICKS = os.sysconf("SC_CLK_TCK")
STALLED_S = 60.0
BESIDE: set[asyncio.Task[object]] = set()


class Posted(BaseModel):
    """A message with the fields that an event of the product has, as large as that event."""

    id: str
    type: str
    source: str
    role: str
    run_id: str
    task_id: str
    episode_id: str
    time: datetime
    to: str
    content: str


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--events", type=int, default=20_000)
    parser.add_argument("--bytes", type=int, default=1024)
    parser.add_argument("--roles", type=int, default=10)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--publishers", type=int, default=64, help="publishing at once")
    parser.add_argument("--url", help="of the peer's server")
    parser.add_argument("--server-pid", type=int, help="whose CPU time counts too")
    return parser.parse_args()


def role_names(options: argparse.Namespace) -> list[str]:
    return [f"role{index:03}" for index in range(options.roles)]


def messages(options: argparse.Namespace) -> list[Posted]:
    """Built before the clock starts, as the product's events are."""
    chance = random.Random(0)
    words = ["".join(chance.choices("etaoinshrdlu", k=1 + i % 9)) for i in range(2000)]
    text = " ".join(chance.choices(words, k=20_000))
    bare = len(_message(0, "role000", options.episodes, "").model_dump_json())
    size = max(options.bytes - bare, 0)
    made: list[Posted] = []
    for number in range(options.events):
        begin = chance.randrange(len(text) - size)
        role = f"role{number % options.roles:03}"
        made.append(_message(number, role, options.episodes, text[begin : begin + size]))
    return made


def _message(number: int, role: str, episodes: int, content: str) -> Posted:
    return Posted(
        id=str(uuid.uuid4()),
        type="message.posted",
        source="owner/bench",
        role="owner",
        run_id="bench",
        task_id="bench",
        episode_id=f"{number % episodes:011}",
        time=datetime.now(UTC),
        to=role,
        content=content,
    )


class Receipts:
    """Which messages have been handled."""

    def __init__(self, wanted: int) -> None:
        self.ids: set[str] = set()
        self._wanted = wanted
        self._complete = asyncio.Event()

    def add(self, message: Posted) -> None:
        self.ids.add(message.id)
        if len(self.ids) >= self._wanted:
            self._complete.set()

    async def complete(self) -> None:
        async with asyncio.timeout(STALLED_S):
            await self._complete.wait()


async def publish_all(
    made: Sequence[Posted], publishers: int, publish: Callable[[Posted], Awaitable[object]]
) -> None:
    """Publish each message, so many at once."""
    waiting = iter(made)

    async def one_by_one() -> None:
        for message in waiting:
            await publish(message)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(publishers):
            tasks.create_task(one_by_one())


def run_beside(works: Iterable[Coroutine[Any, Any, object]]) -> None:
    """Run the consumers until the script ends."""
    for work in works:
        BESIDE.add(asyncio.create_task(work))  # noqa: TID251 - the peers' interpreter need not have anyio


class Clock:
    """Wall and CPU time between start and stop: of this process, and of the server's."""

    def __init__(self, server_pid: int | None) -> None:
        self._pid = server_pid

    def start(self) -> None:
        self._began = time.perf_counter(), time.process_time(), self._server_s()

    def stop(self) -> None:
        now = time.perf_counter(), time.process_time(), self._server_s()
        self.wall_s, self.client_s, self.server_s = (
            after - before for after, before in zip(now, self._began, strict=True)
        )

    def _server_s(self) -> float:
        """User and system time, its ended children's too."""
        if self._pid is None:
            return 0.0
        stat = Path(f"/proc/{self._pid}/stat").read_text(encoding="ascii")
        return sum(map(int, stat.rpartition(")")[2].split()[11:15])) / TICKS


def report(clock: Clock, made: Sequence[Posted], receipts: Receipts, packages: str) -> NoReturn:
    """Print the figures and end at once: an orderly stop is not measured, and some peers take minutes for it."""
    if missing := {message.id for message in made} - receipts.ids:
        sys.exit(f"{len(missing)} of {len(made)} messages were not handled")
    versions = [f"{name} {version(name)}" for name in packages.split()]
    found = {
        "events": len(made),
        "bytes": len(made[0].model_dump_json()),
        "wall_s": clock.wall_s,
        "client_cpu_s": clock.client_s,
        "server_cpu_s": clock.server_s,
        "versions": ", ".join(versions),
    }
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)
