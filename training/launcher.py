"""Starts everything a training run needs, keeps it running, and follows the run's log.

    launcher ─┬─ private bus server      (unless --bus)            restarted with its data
              ├─ sampler                                           restarted; waits for the trainer's weights
              ├─ workers 1 … N           (unless external)         restarted; their episodes are taken over
              ├─ learner ranks 0 … R-1   (rank 0 is the trainer)   restarted together, from checkpoint and log;
              │                                                    ends when it has written how the run ended
              ├─ archiver (bus ─▶ store)
              └─ progress, read off the run's log

Every child ends with this process, whatever ends it. Nothing is kept in memory that a resume would need.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, aclosing, suppress
from functools import partial
from pathlib import Path
from typing import Literal

import anyio
from anyio.abc import TaskGroup

from aworld_runtime.archive.archiver import Archiver
from aworld_runtime.archive.janitor import Janitor
from aworld_runtime.bus.base import Bus, NodeInfo, read_all
from aworld_runtime.bus.open import open_bus
from aworld_runtime.bus.presence import announce, arrivals
from aworld_runtime.bus.room import when_there_is_room
from aworld_runtime.bus.server import PrivateServer
from aworld_runtime.cli.health import serve_health
from aworld_runtime.config import Settings
from aworld_runtime.errors import AWorldError, Fenced, SamplerError, TrainingError, first_error
from aworld_runtime.events import Event, NodeJoined, NodeLeft, RunFinished, utc_now
from aworld_runtime.names import run_log
from aworld_runtime.processes import ChildProcess, spawn
from aworld_runtime.store.base import Store
from aworld_runtime.store.open import open_store
from aworld_runtime.training.log_of_run import (
    expect_in_store,
    expect_on_bus,
    follow,
    put_back_whole,
)
from aworld_runtime.training.run_folder import RunFolder, Wiring
from aworld_runtime.training.sampler.base import SamplerProcess
from aworld_runtime.training.sampler.of_run import port_of_run, sampler_of_run
from aworld_runtime.training.untrained import Untrained

logger = logging.getLogger(__name__)
RESTARTS = 5
"""Restarts of one part, one after another, before the run is given up."""
RESTART_AFTER_S = 0.5
CALM_S = 120.0
"""A part that has run for so long is well: its restarts are counted anew."""
STOP_GRACE_S = 2.0
LAST_WORDS = 12
"""Lines of a log."""
ROOM_S = 10.0
"""How long a part that joins or leaves is kept waiting for a bus that is full."""
DRAIN_S = 60.0
DRAIN_FAILED_S = 10.0
"""For the end of a run that has stopped."""
DRAIN_INTERRUPTED_S = 1.5
"""On Ctrl-C, when somebody waits; a resume archives the rest."""

Say = Callable[[str], None]
Follow = Callable[[Event], None]


class Launcher:
    """Runs one training run's processes until its log says `run.finished`."""

    def __init__(self, folder: RunFolder, *, code_version: str, say: Say, follow: Follow) -> None:
        self._folder = folder
        self._run_id = folder.run_id
        self._config = folder.config
        self._store = self._config.store or Settings.from_env().store
        self._version = code_version
        self._say = say
        self._follow = follow
        self._untrained = Untrained()
        self.began = False
        """Whether anything but the bus has been started."""

    async def run(
        self, *, model: Path, sampler: Literal["vllm", "transformers"], resumed: bool
    ) -> None:
        """Train to the end.

        Raises:
            TrainingError: the run stopped; what is there can be resumed, unless it is a `RunLostError`.
            StoreError: the store has lost the run meanwhile; a resume writes it again.
            BusUnavailableError, StoreUnavailableError: a server that was named can't be reached.
        """
        async with AsyncExitStack() as stack:
            url = self._config.bus or await self._private_bus(stack)
            bus = await stack.enter_async_context(open_bus(url, keys=Settings.from_env().bus_keys))
            store = await stack.enter_async_context(open_store(self._store))
            log = run_log(self._run_id)
            await expect_on_bus(bus, store, log)
            await put_back_whole(bus, store, log)
            port = await port_of_run(self._folder, bus)
            process = self._wire(url, model, sampler, port)
            archiver = await stack.enter_async_context(Archiver(bus, store))
            past = await bus.last_seq(log)
            self.began = True
            try:
                async with anyio.create_task_group() as parts:
                    await self._answer(parts)
                    await self._announce_itself(parts, bus)
                    self._start_workers(parts, bus, url)
                    parts.start_soon(self._janitor(bus, store, archiver).run)
                    parts.start_soon(self._keep_learner, bus, past)
                    parts.start_soon(self._keep_sampler, bus, process, resumed)
                    await self._watch(bus, past)
                    parts.cancel_scope.cancel()
            except BaseException as error:
                if isinstance(error, Exception):
                    end = RunFinished(reason="failed", detail=str(first_error(error)))
                    await self._leave(bus, archiver, end, DRAIN_FAILED_S)
                else:
                    end = RunFinished(reason="interrupted")
                    await self._leave(bus, archiver, end, DRAIN_INTERRUPTED_S)
                raise
            self._say("writing the last events to the store")
            await archiver.drain(DRAIN_S)
            # Opened anew: a file that was removed is still there for who has it open.
            async with open_store(self._store) as reopened:
                await expect_in_store(bus, reopened, log)

    def _wire(
        self, bus: str, model: Path, sampler: Literal["vllm", "transformers"], port: int
    ) -> SamplerProcess:
        """Write down where everything is."""
        self._folder.wiring = Wiring(
            run_id=self._run_id,
            code_version=self._version,
            bus=bus,
            model=str(model.absolute()),
            sampler=sampler,
            sampler_port=port,
        )
        return sampler_of_run(self._folder, self._folder.wiring)

    def _janitor(self, bus: Bus, store: Store, archiver: Archiver) -> Janitor:
        settings = Settings.from_env()
        return Janitor(
            bus,
            store,
            archiver,
            retire_after_s=settings.retire_after_s,
            restore_after_s=settings.restore_after_s,
            keep=self._untrained.needs,
        )

    async def _private_bus(self, stack: AsyncExitStack) -> str:
        server = PrivateServer(self._folder.bus, self._config.bus_port or None)
        await server.start()
        stack.push_async_callback(server.stop)
        # Until the end of all that uses it: what is left of the log is still written to the store.
        keeping = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(keeping.cancel_scope.cancel)
        keeping.start_soon(self._keep_bus, server)
        self._say(f"event bus: private server at {server.url}")
        return server.url

    async def _answer(self, parts: TaskGroup) -> None:
        """At `/healthz` and `/metrics`, if they are wanted; those of the archive are here."""
        if port := self._config.health_port:
            address, said = (self._config.health_host, port), {"status": "ok", "run": self._run_id}
            await parts.start(serve_health, address, lambda: said)

    async def _announce_itself(self, parts: TaskGroup, bus: Bus) -> None:
        """Before any worker joins: those of other code are refused by it."""
        node = NodeInfo(
            name=f"launcher/{self._run_id}",
            kind="launcher",
            version=self._version,
            pid=os.getpid(),
            host=socket.gethostname(),
            since=utc_now(),
        )
        await bus.announce(node)
        parts.start_soon(_here, bus, node)

    def _start_workers(self, parts: TaskGroup, bus: Bus, url: str) -> None:
        config = self._config
        if config.external_workers:
            parts.start_soon(self._note_workers, bus)
            return
        self._say(f"workers: {config.worker_num} processes of {config.slots} episodes each")
        for number in range(1, config.worker_num + 1):
            parts.start_soon(self._keep_worker, bus, url, number)

    # --- children --------------------------------------------------------------------------------------------------

    async def _spawn(
        self, argv: list[str], name: str, env: Mapping[str, str | None]
    ) -> ChildProcess:
        # Threads that wait for one another must not spin, for all of these share the cores; and what
        # the learner frees must not stay behind in an arena of each thread (2 GB after ten steps).
        return await spawn(
            argv,
            log=self._folder.log / f"{name}.log",
            name=name,
            env={
                "TOKENIZERS_PARALLELISM": "false",
                "OMP_WAIT_POLICY": "PASSIVE",
                "MALLOC_ARENA_MAX": "2",
                **env,
            },
        )

    async def _spawn_learner(self) -> ChildProcess:
        """Several ranks run under torchrun, which ends all of them when one dies."""
        ranks = self._config.learner_ranks
        run = ["-m", "aworld_runtime.training.rank", str(self._folder.path)]
        # One rank is alone, also where we are ourselves a process of torchrun's.
        env: dict[str, str | None] = {"RANK": None, "WORLD_SIZE": None}
        if ranks > 1:
            torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            run = [*torchrun, *run]
        return await self._spawn([sys.executable, *run], "learner", env)

    async def _keep_worker(self, bus: Bus, url: str, number: int) -> None:
        """Run it, and run it again when it dies. Its name is its own among the workers of all runs on the bus."""
        name = f"{self._run_id.rpartition('-')[2]}-w{number}"
        argv = [
            *(sys.executable, "-m", "aworld_runtime.cli", "worker"),
            *("--name", name, "--slots", str(self._config.slots)),
        ]
        losses = Losses(f"worker {name}", f"worker/{name}")
        while True:
            # The URL may hold a password, and everybody can read a command line.
            child = await self._spawn(argv, f"w{number}", {"AWORLD_BUS": url})
            try:
                await self._note(bus, NodeJoined(node=losses.node, kind="worker"))
                await child.wait()
            finally:
                await child.stop(grace=STOP_GRACE_S)
            await self._lost(bus, losses, child.returncode, child.log_tail(LAST_WORDS))

    async def _keep_learner(self, bus: Bus, past: int) -> None:
        """Run its ranks, and run all of them again when one dies, until they have ended the run.

        Raises:
            TrainingError: they ended, and the run's log doesn't say how it ended: nobody would write it any more.
        """
        losses = Losses("learner", f"learner/{self._run_id}")
        while True:
            child = await self._spawn_learner()
            try:
                code = await child.wait()
            finally:
                await child.stop(grace=STOP_GRACE_S)
            if code == 0:
                news = await read_all(bus, run_log(self._run_id), past + 1)
                if not any(isinstance(event.data, RunFinished) for event in news):
                    raise TrainingError(
                        f"the learner ended without ending the run; the end of {child.log}:\n{child.log_tail(LAST_WORDS)}"
                    )
                return
            await self._lost(bus, losses, code, child.log_tail(LAST_WORDS))

    async def _keep_sampler(self, bus: Bus, sampler: SamplerProcess, resumed: bool) -> None:
        """Run it, and run it again when it dies; what has never run is not tried again."""
        losses = Losses("sampler", f"sampler/{self._run_id}")
        ran = False
        while True:
            self._say(f"sampler: {sampler.kind} starting (log: {sampler.log})")
            why = ""
            try:
                await sampler.start(hold=resumed or ran)
                self._say(f"sampler: {sampler.kind} at {sampler.url}")
                ran = True
                async with anyio.create_task_group() as beside:
                    beside.start_soon(_here, bus, self._node_of(sampler))
                    await sampler.wait()
                    beside.cancel_scope.cancel()
            except SamplerError as error:
                if not ran:
                    raise
                why = str(error)
            finally:
                await sampler.stop()
            await self._lost(bus, losses, sampler.returncode, why)

    async def _keep_bus(self, server: PrivateServer) -> None:
        losses = Losses("event bus", f"bus/{self._run_id}")
        while (process := server.process) is not None:
            code = await server.watch()
            losses.add(process.log_tail(LAST_WORDS))
            self._say(f"event bus died (exit code {code}): starting it again with its data")
            await server.start()

    async def _lost(self, bus: Bus, losses: Losses, code: int | None, last_words: str) -> None:
        losses.add(last_words)
        self._say(f"{losses.what} died (exit code {code}); starting it again")
        if last_words:
            logger.warning("%s, last words:\n%s", losses.what, last_words)
        await self._note(bus, NodeLeft(node=losses.node, reason=f"exit code {code}"))
        await anyio.sleep(RESTART_AFTER_S)

    # --- bus -------------------------------------------------------------------------------------------------------

    async def _note_workers(self, bus: Bus) -> None:
        """Those of other machines, as they come and go."""
        async with aclosing(arrivals(bus, "worker")) as changes:
            async for change in changes:
                await self._note(bus, change)

    async def _note(self, bus: Bus, data: NodeJoined | NodeLeft) -> None:
        """Into the run's log, by way of its owner."""
        run_id = self._run_id
        event = Event.of(data, source=f"launcher/{run_id}", run_id=run_id)
        send = partial(bus.send_mail, run_log(run_id), event)
        # Not for ever: the owner that makes room there may be the one to be started again.
        await when_there_is_room(send, who=f"launcher {run_id}", patience_s=ROOM_S)

    def _node_of(self, sampler: SamplerProcess) -> NodeInfo:
        return NodeInfo(
            name=f"sampler/{self._run_id}",
            kind="sampler",
            version=self._version,
            url=sampler.url,
            pid=sampler.pid or 0,
            since=utc_now(),
        )

    async def _watch(self, bus: Bus, past: int) -> None:
        """Show the run's events until it is finished; an end among the `past` ones has been resumed from.

        Raises:
            TrainingError: the trainer has stopped it, or the bus has lost it.
        """
        async with aclosing(follow(bus, run_log(self._run_id))) as events:
            async for event in events:
                self._follow(event)
                self._untrained.add(event)
                if isinstance(event.data, RunFinished) and event.seq > past:
                    if event.data.reason != "done":
                        raise TrainingError(event.data.detail)
                    return

    # --- the end ---------------------------------------------------------------------------------------------------

    async def _leave(self, bus: Bus, archiver: Archiver, end: RunFinished, seconds: float) -> None:
        """After an error, which is what the user must see: not why this fails too."""
        with anyio.move_on_after(seconds + 1, shield=True):
            try:
                await self._end(bus, end)
                await archiver.drain(seconds)
            except AWorldError as error:
                logger.warning("the run's last events are not in the store yet: %s", error)

    async def _end(self, bus: Bus, end: RunFinished) -> None:
        """Write how the run ended into its log, in place of its trainer, which has been stopped; unless it has ended."""
        log = run_log(self._run_id)
        last = await bus.last_seq(log)
        newest = await bus.read(log, last, limit=1) if last else []
        if newest and not isinstance(newest[0].data, RunFinished):
            event = Event.of(end, source=f"launcher/{self._run_id}", run_id=self._run_id)
            with suppress(Fenced):  # by a new owner, who goes on with the run
                await bus.append(log, last, [event])


async def _here(bus: Bus, node: NodeInfo) -> None:
    await announce(bus, lambda: [node], who=node.name)


class Losses:
    """How often a part has died without a calm time between."""

    def __init__(self, what: str, node: str) -> None:
        self.what = what
        self.node = node
        """What the run's log calls it."""
        self._times: list[float] = []

    def add(self, last_words: str) -> None:
        """It died again.

        Raises:
            TrainingError: too often.
        """
        now = time.monotonic()
        if self._times and now - self._times[-1] > CALM_S:
            self._times.clear()
        self._times.append(now)
        if len(self._times) > RESTARTS:
            raise TrainingError(
                f"{self.what} died {len(self._times)} times, one after another; its last words:\n{last_words}"
            )
