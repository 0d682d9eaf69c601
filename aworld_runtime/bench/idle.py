"""`aworld bench idle`: memory of an episode that is owned and waits, with all its roles.

    submit ─▶ worker "host" ─▶ owner ─▶ role000 asks a human ── waits ──▶ measured ─▶ mail: the answer ─▶ finished
                     worker "guest" joins, runs a few, leaves, and joins again meanwhile

What is measured is all that an episode costs this process: its owner, its log on the memory bus, its claim, and what the
runtime and the archive know of it.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from aworld_runtime.bench import targets
from aworld_runtime.bench.bus import Machine
from aworld_runtime.bench.cost import rss_bytes
from aworld_runtime.bench.load import role_name
from aworld_runtime.bench.progress import Progress
from aworld_runtime.bench.targets import Hold
from aworld_runtime.bus.base import Bus
from aworld_runtime.errors import ConfigError
from aworld_runtime.events import (
    EpisodeFinished,
    EpisodeRequested,
    Event,
    HumanAnswered,
    HumanAsked,
)
from aworld_runtime.messages import Data
from aworld_runtime.names import episode_log
from aworld_runtime.nodes.context import Context
from aworld_runtime.nodes.node import Program
from aworld_runtime.nodes.worker import Worker
from aworld_runtime.runtime import Runtime

PROGRAM = "local:idle"
WARM_UP = 50
"""Episodes, at most, that are run to their end first: code is loaded, pools are filled."""
GUEST_EPISODES = 5
GUEST_TURNS = 4
WAIT_S = 120.0


class IdleReport(Data):
    """What `aworld bench idle --json` prints."""

    kb_per_episode: float
    """Growth of this process's memory in RAM over the idle episodes, after a garbage collection."""
    episodes: int
    roles: int
    rss_before_mb: float
    rss_after_mb: float
    start_s: float
    """Until the last of the episodes waited."""
    idle_cpu_percent: float
    """Of one core, while all of them wait."""
    joins: int
    leaves: int
    machine: Machine
    holds: tuple[Hold, ...]
    verified: bool
    faults: tuple[str, ...]


class Asker:
    """The role that asks at the beginning and finishes with the answer."""

    role = role_name(0)
    subscriptions = (EpisodeRequested.type,)

    def __init__(self, asked: dict[str, str]) -> None:
        self._asked = asked

    async def handle(self, ctx: Context, event: Event) -> None:
        if isinstance(event.data, HumanAnswered):
            ctx.emit(EpisodeFinished(answer=event.data.answer))
        elif event.episode_id is not None:
            self._asked[event.episode_id] = ctx.emit(HumanAsked(question="Shall it go on?")).id


class Bystander:
    """A role that listens to what never comes."""

    subscriptions = (HumanAnswered.type,)

    def __init__(self, role: str) -> None:
        self.role = role

    async def handle(self, ctx: Context, event: Event) -> None:
        """Nothing to do."""


class Waiting:
    """A program of many roles. `asked` is who waits: episode id → the id of its question."""

    def __init__(self, roles: int) -> None:
        self.asked: dict[str, str] = {}
        others = [Bystander(role_name(index)) for index in range(1, roles)]
        self._program = Program(nodes=(Asker(self.asked), *others))

    def program(self) -> Program:
        return self._program


class IdleBench:
    """A runtime without a worker of its own, a host for the idle episodes, and guests."""

    def __init__(self, episodes: int, roles: int, progress: Progress) -> None:
        if episodes < 1 or roles < 1:
            raise ConfigError(f"--episodes {episodes} --roles {roles}: expected 1 or more")
        self._episodes = episodes
        self._roles = roles
        self._progress = progress
        self._waiting = Waiting(roles)
        self.joins = self.leaves = 0
        self.faults: list[str] = []

    async def run(self) -> IdleReport:
        """Measure, then let every episode end."""
        machine = Machine.this()
        with tempfile.TemporaryDirectory(prefix="aworld-bench-") as folder:
            store = f"sqlite:///{Path(folder) / 'bench.db'}"
            async with (
                Runtime(bus="memory://", store=store, slots=0, kind="bench") as runtime,
                self._worker(runtime.bus, "host", self._episodes + GUEST_EPISODES),
            ):
                await self._answer(
                    runtime, await self._submit(runtime, min(WARM_UP, self._episodes))
                )
                before, began = _settled_rss(), time.monotonic()
                idle = await self._submit(runtime, self._episodes)
                start_s = time.monotonic() - began
                self._progress.say(f"{len(idle):,} episodes wait, after {start_s:.1f} s")
                await anyio.sleep(1)  # the archiver catches up
                after = _settled_rss()
                idle_cpu = await _cpu_percent(1.0)
                self._progress.say("workers join and leave")
                for turn in range(GUEST_TURNS):
                    await self._guest(runtime, f"guest{turn}", patient=bool(turn % 2))
                self._progress.say("the idle episodes get their answers")
                await self._answer(runtime, idle)
        kb = (after - before) / 1024 / self._episodes
        return IdleReport(
            kb_per_episode=kb,
            episodes=self._episodes,
            roles=self._roles,
            rss_before_mb=before / 2**20,
            rss_after_mb=after / 2**20,
            start_s=start_s,
            idle_cpu_percent=idle_cpu,
            joins=self.joins,
            leaves=self.leaves,
            machine=machine,
            holds=(targets.at_most("kb_per_episode", kb, targets.IDLE_KB, "KB"),),
            verified=not self.faults,
            faults=tuple(self.faults),
        )

    async def _submit(self, runtime: Runtime, count: int) -> list[str]:
        """Start so many episodes; returns once each of them waits."""
        ids = [await runtime.submit(PROGRAM, "Wait.") for _ in range(count)]

        async def all_wait() -> bool:
            return all(episode_id in self._waiting.asked for episode_id in ids)

        await self._until(all_wait, f"{count} episodes wait")
        return ids

    async def _answer(self, runtime: Runtime, ids: Sequence[str]) -> None:
        """Let episodes end, and see that they do."""
        for episode_id in ids:
            if (asked := self._waiting.asked.pop(episode_id, None)) is not None:
                answer = Event.of(
                    HumanAnswered(answer=episode_id),
                    source="human/bench",
                    run_id=runtime.run_id,
                    episode_id=episode_id,
                    correlation_id=asked,
                    to=Asker.role,
                )
                await runtime.bus.send_mail(episode_log(episode_id), answer)
        ended = 0
        with anyio.move_on_after(WAIT_S):
            for episode_id in ids:
                episode = await runtime.result(episode_id)
                ended += 1
                if episode.answer != episode_id:
                    why = f"{episode.reason}: {episode.error}"
                    self.faults.append(f"episode {episode_id} ended without its answer ({why})")
        if ended < len(ids):
            self.faults.append(f"{len(ids) - ended} episodes had not ended after {WAIT_S:.0f} s")

    async def _guest(self, runtime: Runtime, name: str, *, patient: bool) -> None:
        """A worker comes, runs what the host has no slot for, and goes: once that has ended, or while it waits."""
        async with self._worker(runtime.bus, name, GUEST_EPISODES):
            await self._until_listed(runtime.bus, name, listed=True)
            ids = await self._submit(runtime, 2 * GUEST_EPISODES)
            if patient:
                await self._answer(runtime, ids)
        await self._until_listed(runtime.bus, name, listed=False)
        if not patient:
            async with self._worker(runtime.bus, f"{name}-successor", GUEST_EPISODES):
                await self._answer(runtime, ids)

    @asynccontextmanager
    async def _worker(self, bus: Bus, name: str, slots: int) -> AsyncGenerator[Worker]:
        worker = Worker(bus, name=name, slots=slots, programs={PROGRAM: self._waiting})
        self.joins += 1
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(worker.run)
            yield worker
            tasks.cancel_scope.cancel()
        self.leaves += 1

    async def _until_listed(self, bus: Bus, name: str, *, listed: bool) -> None:
        async def as_wanted() -> bool:
            return any(node.name == f"worker/{name}" for node in await bus.nodes()) is listed

        await self._until(as_wanted, f"worker {name} is {'' if listed else 'no longer '}listed")

    async def _until(self, true: Callable[[], Awaitable[bool]], what: str) -> None:
        with anyio.move_on_after(WAIT_S) as scope:
            while not await true():  # noqa: ASYNC110 - several things may make it so
                await anyio.sleep(0.02)
        if scope.cancelled_caught:
            self.faults.append(f"not so after {WAIT_S:.0f} s: {what}")


def _settled_rss() -> int:
    gc.collect()
    return rss_bytes()


async def _cpu_percent(seconds: float) -> float:
    """What this process does of its own while nobody asks it anything."""
    began, cpu = time.perf_counter(), time.process_time()
    await anyio.sleep(seconds)
    return 100 * (time.process_time() - cpu) / (time.perf_counter() - began)
