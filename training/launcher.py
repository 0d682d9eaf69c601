"""Starts everything a training run needs, keeps it running, and follows the run's log.

    launcher ─┬─ private bus server      (unless --bus)            restarted with its data
              ├─ sampler                                           restarted; waits for the trainer's weights
              ├─ workers 1 … N           (unless external)         restarted; their episodes are taken over
              ├─ learner ranks 0 … R-1   (rank 0 is the trainer)   restarted together, from checkpoint and log
              ├─ archiver (bus ─▶ store)
              └─ progress, read off the run's log

Every child ends with this process, whatever ends it. Nothing is kept in memory that a resume would need.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Literal, cast

import anyio
from anyio.abc import TaskGroup

from aworld_runtime.bus.base import Bus, NodeInfo
from aworld_runtime.bus.open import open_bus
from aworld_runtime.bus.server import PrivateServer
from aworld_runtime.config import Settings
from aworld_runtime.errors import AWorldError, ProcessError, TrainingError
from aworld_runtime.events import Event, NodeJoined, NodeLeft, RunFinished, utc_now
from aworld_runtime.names import run_log
from aworld_runtime.nodes.archiver import Archiver
from aworld_runtime.processes import ChildProcess, spawn
from aworld_runtime.store.open import open_store
from aworld_runtime.training.run_folder import RunFolder, Wiring
from aworld_runtime.training.sampler.base import SamplerProcess, free_port
from aworld_runtime.training.sampler.of_run import sampler_of_run

logger = logging.getLogger(__name__)
RESTARTS = 10
"""Restarts of one part before the run is given up."""
RESTART_AFTER_S = 0.5
STOP_GRACE_S = 2.0
ANNOUNCE_EVERY_S = 1.0
DRAIN_S = 60.0

Say = Callable[[str], None]
Follow = Callable[[Event], None]


class Launcher:
    """Runs one training run's processes until its log says `run.finished`."""

    def __init__(self, folder: RunFolder, *, code_version: str, say: Say, follow: Follow) -> None:
        self._folder = folder
        self._config = folder.config
        self._version = code_version
        self._say = say
        self._follow = follow
        self._server: PrivateServer | None = None
        self._finished = anyio.Event()

    async def run(
        self, *, model: Path, sampler: Literal["vllm", "transformers"], resumed: bool
    ) -> None:
        """Train to the end.

        Raises:
            TrainingError: the run stopped; what is there can be resumed.
            BusUnavailableError, StoreUnavailableError: a server that was named can't be reached.
        """
        async with AsyncExitStack() as stack:
            url = self._config.bus or await self._private_bus(stack)
            bus = await stack.enter_async_context(open_bus(url))
            store = await stack.enter_async_context(
                open_store(self._config.store or Settings.from_env().store)
            )
            process = self._wire(url, model, sampler, resumed=resumed)
            archiver = await stack.enter_async_context(Archiver(bus, store))
            async with anyio.create_task_group() as parts:
                if self._server is not None:
                    parts.start_soon(self._keep_bus, self._server)
                self._start_parts(parts, bus, url)
                parts.start_soon(self._keep_sampler, bus, process, resumed)
                await self._watch(bus)
                parts.cancel_scope.cancel()
            self._say("writing the last events to the store")
            await archiver.drain(DRAIN_S)

    def _wire(
        self, bus: str, model: Path, sampler: Literal["vllm", "transformers"], *, resumed: bool
    ) -> SamplerProcess:
        """Write down where everything is. A resumed run keeps its sampler's address: queued episodes name it."""
        port = (
            self._folder.wiring.sampler_port
            if resumed
            else self._config.sampler_port or free_port()
        )
        self._folder.wiring = Wiring(
            run_id=self._folder.run_id,
            code_version=self._version,
            bus=bus,
            model=str(model),
            sampler=sampler,
            sampler_port=port,
        )
        return sampler_of_run(self._folder, self._folder.wiring)

    async def _private_bus(self, stack: AsyncExitStack) -> str:
        server = PrivateServer(self._folder.bus, self._config.bus_port or None)
        await server.start()
        stack.push_async_callback(server.stop)
        self._server = server
        self._say(f"event bus: private server at {server.url}")
        return server.url

    def _start_parts(self, parts: TaskGroup, bus: Bus, url: str) -> None:
        config = self._config
        if not config.external_workers:
            self._say(f"workers: {config.worker_num} processes of {config.slots} episodes each")
            for number in range(1, config.worker_num + 1):
                name = f"w{number}"
                argv = [
                    *(sys.executable, "-m", "aworld_runtime.cli", "worker", "--bus", url),
                    *("--name", name, "--slots", str(config.slots)),
                ]
                start = partial(self._spawn, argv, name)
                parts.start_soon(self._keep, bus, name, "worker", start)
        parts.start_soon(self._keep, bus, "learner", "learner", self._spawn_learner)

    # --- children --------------------------------------------------------------------------------------------------

    async def _spawn(self, argv: list[str], name: str) -> ChildProcess:
        # One thread per process: workers and ranks share the cores with the sampler.
        return await spawn(
            argv,
            log=self._folder.log / f"{name}.log",
            name=name,
            env={"TOKENIZERS_PARALLELISM": "false"},
        )

    async def _spawn_learner(self) -> ChildProcess:
        """Several ranks run under torchrun, which starts all of them again when one dies."""
        ranks = self._config.learner_ranks
        run = ["-m", "aworld_runtime.training.rank", str(self._folder.path)]
        if ranks > 1:
            torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            run = [*torchrun, f"--max-restarts={RESTARTS}", *run]
        return await self._spawn([sys.executable, *run], "learner")

    async def _keep(
        self, bus: Bus, name: str, kind: str, start: Callable[[], Awaitable[ChildProcess]]
    ) -> None:
        """Run a part, and run it again when it dies, until the run is finished."""
        for restart in range(RESTARTS + 1):
            child = await start()
            try:
                if kind == "worker":
                    await self._note(bus, NodeJoined(node=f"worker/{name}", kind=kind))
                code = await child.wait()
                if self._finished.is_set() or (kind == "learner" and code == 0):
                    return
                await self._lost(bus, f"{kind} {name}", code, child.log_tail(12), restart)
            finally:
                await child.stop(grace=STOP_GRACE_S)
        raise TrainingError(
            f"{name} died {RESTARTS + 1} times; its log: {self._folder.log / name}.log"
        )

    async def _keep_sampler(self, bus: Bus, sampler: SamplerProcess, resumed: bool) -> None:
        for restart in range(RESTARTS + 1):
            self._say(f"sampler: {sampler.kind} starting (log: {sampler.log})")
            try:
                await sampler.start(hold=resumed or restart > 0)
                self._say(f"sampler: {sampler.kind} at {sampler.url}")
                async with anyio.create_task_group() as beside:
                    beside.start_soon(self._announce, bus, sampler)
                    await sampler.wait()
                    beside.cancel_scope.cancel()
                await self._lost(bus, "sampler", sampler.returncode, "", restart)
            finally:
                await sampler.stop()
        raise TrainingError(f"the sampler died {RESTARTS + 1} times; its log: {sampler.log}")

    async def _keep_bus(self, server: PrivateServer) -> None:
        for _ in range(RESTARTS + 1):
            process = server.process
            if process is None:
                return
            code = await process.wait()
            self._say(f"event bus died (exit code {code}): starting it again with its data")
            await server.start()
        raise ProcessError(
            f"the bus server died {RESTARTS + 1} times; its data and log: {server.folder}"
        )

    async def _lost(self, bus: Bus, what: str, code: int | None, tail: str, restart: int) -> None:
        self._say(
            f"{what} died (exit code {code}); starting it again ({restart + 1} of {RESTARTS})"
        )
        if tail:
            logger.warning("%s, last words:\n%s", what, tail)
        await self._note(bus, NodeLeft(node=what, reason=f"exit code {code}"))
        await anyio.sleep(RESTART_AFTER_S)

    # --- bus -------------------------------------------------------------------------------------------------------

    async def _note(self, bus: Bus, data: NodeJoined | NodeLeft) -> None:
        """Into the run's log, by way of its owner."""
        run_id = self._folder.run_id
        event = Event.of(data, source=f"launcher/{run_id}", run_id=run_id)
        await bus.send_mail(run_log(run_id), event)

    async def _announce(self, bus: Bus, sampler: SamplerProcess) -> None:
        since = utc_now()
        while True:
            node = NodeInfo(
                name=f"sampler/{self._folder.run_id}",
                kind="sampler",
                version=self._version,
                url=sampler.url,
                pid=sampler.pid or 0,
                since=since,
            )
            await bus.announce(node)
            await anyio.sleep(ANNOUNCE_EVERY_S)

    async def _watch(self, bus: Bus) -> None:
        """Show the run's events until it is finished."""
        async with bus.tail(run_log(self._folder.run_id)) as events:
            async for event in events:
                self._follow(event)
                if isinstance(event.data, RunFinished):
                    self._finished.set()
                    if event.data.reason != "done":
                        raise TrainingError(
                            f"the run stopped: {event.data.reason}: {event.data.detail}"
                        )
                    return


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The most telling leaf of an exception group: one of ours before any other."""
    leaves = list(_leaves(group))
    return next((e for e in leaves if isinstance(e, AWorldError)), leaves[0])


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in cast("BaseExceptionGroup[BaseException]", error).exceptions:
            yield from _leaves(inner)
    else:
        yield error
