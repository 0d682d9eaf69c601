"""The live phase of `aworld bench replay`: purchases on workers of their own, one of which is killed in the middle.

submit ─▶ a private server ─▶ worker-1 … worker-3 (processes) ─▶ logs ─▶ store
                ▲                  ✗ the fullest is killed, worker-4 comes, and others take its episodes over
                └── mail ── person: answers human.asked
"""

from __future__ import annotations

import signal
import sys
import time
from collections import Counter
from pathlib import Path

import anyio

from aworld_runtime.bench.progress import Progress
from aworld_runtime.bench.purchasing import PURCHASING, YES, Purchases, chance
from aworld_runtime.bus.server import PrivateServer
from aworld_runtime.errors import ProcessError
from aworld_runtime.events import (
    EpisodeClaimed,
    EpisodeFinished,
    EpisodeTakenOver,
    Event,
    HumanAsked,
)
from aworld_runtime.names import episode_log
from aworld_runtime.processes import ChildProcess, spawn
from aworld_runtime.runtime import Runtime

WORKERS = 3
SLOTS = 32
PERSON_S = 0.25
"""Seconds in which the person answers."""
AGREES = 0.8
"""Share of the questions to which the answer is yes."""
ENDED_BEFORE = 1 / 3
"""Share of the episodes that have ended when a worker is killed."""
STOP_S = 1.0
PATIENCE_S = 60.0
PATIENCE_PER_EPISODE_S = 2.0
"""All of them are done in so much; they take a tenth of it."""


class LivePhase:
    """Runs `episodes` purchases into `store`, with the files of server and workers in `folder`."""

    def __init__(self, folder: Path, store: str, episodes: int, progress: Progress) -> None:
        self.wall_s = 0.0
        """From the first request to the last end, once it has run."""
        self._folder = folder
        self._store = store
        self._episodes = episodes
        self._progress = progress
        self._kill_after = episodes * ENDED_BEFORE
        self._workers: dict[str, ChildProcess] = {}
        self._owners: dict[str, str] = {}
        """Who has which unfinished episode."""
        self._ended = 0
        self._killed = ""

    async def run(self) -> None:
        """Until every episode has ended and is in the store.

        Raises:
            ProcessError: they were not done in time.
        """
        async with (
            PrivateServer(self._folder / "server") as server,
            Runtime(bus=server.url, store=self._store, slots=0, kind="bench") as runtime,
        ):
            try:
                for _ in range(WORKERS):
                    await self._start_worker(server.url)
                await self._run_all(runtime)
            finally:
                for worker in self._workers.values():
                    await worker.stop(grace=STOP_S)

    async def _run_all(self, runtime: Runtime) -> None:
        began = time.monotonic()
        patience_s = PATIENCE_S + PATIENCE_PER_EPISODE_S * self._episodes
        with anyio.move_on_after(patience_s) as limit:
            async with anyio.create_task_group() as tasks:
                for seed, task in enumerate(Purchases().tasks("test", count=self._episodes)):
                    episode_id = await runtime.submit(PURCHASING, task, seed=seed)
                    tasks.start_soon(self._see_through, runtime, episode_id)
        if limit.cancelled_caught:
            tails = "\n".join(f"{w.name}: {w.log_tail(3)}" for w in self._workers.values())
            raise ProcessError(
                f"{self._ended} of {self._episodes} episodes were done in {patience_s:g} s; the last words of the"
                f" workers:\n{tails}"
            )
        self.wall_s = time.monotonic() - began

    async def _start_worker(self, bus: str) -> None:
        name = f"worker-{len(self._workers) + 1}"
        argv = [sys.executable, "-m", "aworld_runtime.cli", "worker", "--bus", bus]
        argv += ["--slots", str(SLOTS), "--name", name]
        self._workers[name] = await spawn(argv, log=self._folder / f"{name}.log", name=name)

    async def _see_through(self, runtime: Runtime, episode_id: str) -> None:
        """Follow an episode to its end: know who owns it, be the person, and kill a worker when it is time."""
        async with runtime.bus.tail(episode_log(episode_id)) as events:
            async for event in events:
                match event.data:
                    case EpisodeClaimed(worker=worker) | EpisodeTakenOver(worker=worker):
                        self._owners[episode_id] = worker
                    case HumanAsked():
                        await _answer(runtime, event)
                    case EpisodeFinished():
                        break
                    case _:
                        pass
        self._ended += 1
        self._progress.tick(f"{self._ended} of {self._episodes} episodes have ended")
        self._owners.pop(episode_id, None)
        if not self._killed and self._ended >= self._kill_after and self._owners:
            await self._kill_one(runtime.bus.url)
        await runtime.result(episode_id)

    async def _kill_one(self, bus: str) -> None:
        ((self._killed, episodes),) = Counter(self._owners.values()).most_common(1)
        self._progress.say(f"kill -9 of {self._killed}, which has {episodes} unfinished episodes")
        self._workers[self._killed].send_signal(signal.SIGKILL)
        await self._start_worker(bus)


async def _answer(runtime: Runtime, asked: Event) -> None:
    """What a person does: thinks a moment, then says yes or no."""
    await anyio.sleep(PERSON_S)
    answer = YES if chance(asked.id) < AGREES else "no"
    await runtime.answer(asked.episode_id or "", answer, question=asked.seq)
