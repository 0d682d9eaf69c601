"""The processes of a run, and what can be done to them.

    parts (worker…, tools…, archiver, submitter, sender, receiver) ──▶ proxy ──▶ bus server
                                     └──▶ store: a Mongo server, or a SQLite file

All are children that do not outlive this process. A part that ends without having been told is noted, and started again.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from inspect import isawaitable
from pathlib import Path

import anyio
from anyio.abc import TaskGroup

from aworld_runtime.bus.server import PrivateServer
from aworld_runtime.chaos.part import PLACE, Place
from aworld_runtime.chaos.plan import Blow
from aworld_runtime.chaos.proxy import Mode, tell
from aworld_runtime.chaos.workload import EXIT_CODE
from aworld_runtime.errors import ProcessError
from aworld_runtime.processes import HOST, ChildProcess, free_port, listens, spawn

logger = logging.getLogger(__name__)

WORKERS = 4
TOOL_WORKERS = 2
READY_S = 20.0
POLL_S = 0.05
MONGO_READY_S = 60.0
DISK_MB = 512
HUNG_S = 30.0
"""A server that is silent for so long is taken for hung: longer than any fault."""
STOP_S = 8.0
CLONE_NEWNS = 0x00020000
LIBFAKETIME = "faketime/libfaketime.so.1"


@dataclass
class Part:
    """One part of a run, through all its lives."""

    role: str
    slot: str
    lives: int = 0
    name: str = ""
    process: ChildProcess | None = None
    stopped: bool = False
    env: dict[str, str] = field(default_factory=dict[str, str])


class Stage:
    """Inside `async with on_stage(...)`."""

    def __init__(
        self, folder: Path, seed: int, load: int, mongo_program: str | None, tasks: TaskGroup
    ) -> None:
        self.folder = folder
        self.mongo_program = mongo_program
        self.blows: list[Blow] = []
        self.crashes: list[str] = []
        self.parts: dict[str, Part] = {}
        self.disks: dict[str, Path] = {}
        """Small file systems, by whose data they hold; none where they could not be mounted."""
        self.no_disks = ""
        self.chance = random.Random(seed)
        self.server = PrivateServer(folder / "server")
        self.port = free_port()
        self.control = folder / "proxy.sock"
        self.place = Place(
            run_id=f"chaos-{seed}-{os.getpid()}",
            bus="",
            store="",
            folder=str(folder),
            outstanding=load,
        )
        self._mongo: ChildProcess | None = None
        self._mongo_port = 0
        self._tasks = tasks
        self._doomed: set[ChildProcess] = set()
        """Those whose end was asked for."""

    async def open(self, *, small_disks: bool) -> None:
        """Start everything."""
        if small_disks:
            self._mount_disks()
        await self.server.start()
        self._tasks.start_soon(self._look_after_server)
        argv = [sys.executable, "-m", "aworld_runtime.chaos.proxy"]
        argv += [str(self.port), str(self.server.port), str(self.control)]
        self._proxy = await spawn(
            argv, log=self.folder / "proxy.log", env=self._env(), name="proxy"
        )
        if not await until(self.control.exists):
            raise ProcessError(f"the proxy did not start: {self._proxy.log_tail(5)}")
        store = f"sqlite:///{self.folder}/store/aworld.db"
        if self.mongo_program:
            self._mongo_port = free_port()
            await self.start_store()
            store = f"mongodb://{HOST}:{self._mongo_port}/chaos"
        self.place = self.place.model_copy(update={"bus": self.url(self.port), "store": store})
        for role, count in PARTS.items():
            for number in range(1, count + 1):
                slot = role if count == 1 else f"{role}-{number}"
                self.parts[slot] = Part(role, slot)
                await self.start(self.parts[slot])

    def url(self, port: int | None) -> str:
        """Of the bus: through the proxy, or with the server's own port past it."""
        return f"redis://{HOST}:{port}/0"

    # parts

    async def start(self, part: Part, env: dict[str, str] | None = None) -> None:
        """Start the next life of a part."""
        part.lives += 1
        part.name = f"{part.slot}.{part.lives}"
        part.stopped = False
        part.env = env or {}
        argv = [sys.executable, "-m", "aworld_runtime.chaos.part", part.role, part.name]
        log = self.folder / "logs" / f"{part.slot}.log"
        part.process = await spawn(argv, log=log, env={**self._env(), **part.env}, name=part.name)
        self._tasks.start_soon(self._watch, part, part.process)

    async def kill(self, part: Part) -> None:
        """Kill -9, and wait until it is gone."""
        if part.process is None:
            return
        self._doomed.add(part.process)
        part.process.send_signal(signal.SIGKILL)
        await part.process.wait(deadline=READY_S)

    def some_part(self, roles: tuple[str, ...], dice: float) -> Part | None:
        """One that runs, by the dice; not one that has just ended, which is being started again."""
        alive = [
            part
            for part in self.parts.values()
            if part.role in roles and not part.stopped and not self.ended(part.slot)
        ]
        return alive[int(dice * len(alive))] if alive else None

    async def _watch(self, part: Part, process: ChildProcess) -> None:
        code = await process.wait()
        if process in self._doomed:
            return
        if code != EXIT_CODE or part.role != "worker":
            self.crashes.append(f"{part.name} ended with code {code}: {process.log_tail(1)}")
        self.blow("worker_killed" if part.role == "worker" else "ended", part.name)
        await self.start(part)

    def terminate(self, slot: str) -> None:
        """Ask a part to end in order."""
        part = self.parts[slot]
        if part.process is not None:
            self._doomed.add(part.process)
            part.process.send_signal(signal.SIGTERM)

    def ended(self, slot: str) -> bool:
        """Whether a part has ended."""
        process = self.parts[slot].process
        return process is None or process.returncode is not None

    def blow(
        self, kind: str, target: str, began: float | None = None, held: Sequence[str] = ()
    ) -> None:
        """Write down what was done, until now."""
        now = time.monotonic()
        blow = Blow(kind, target, now if began is None else began, now, tuple(held))
        self.blows.append(blow)
        with (self.folder / "faults.jsonl").open("a") as file:
            file.write(json.dumps(asdict(blow)) + "\n")

    # server, network

    async def network(self, mode: Mode) -> None:
        """Let the proxy do this from now on."""
        await tell(self.control, mode)

    async def kill_server(self) -> None:
        """Kill -9."""
        if self.server.process is not None:
            self.server.process.send_signal(signal.SIGKILL)
            await self.server.process.wait(deadline=READY_S)

    async def _look_after_server(self) -> None:
        """As a launcher does; but who killed it starts it again."""
        while True:
            if self.server.process is not None and self.server.process.returncode is None:
                await self.server.watch(HUNG_S)
            await anyio.sleep(POLL_S)

    def empty_server(self) -> None:
        """Remove its data; it must be dead."""
        shutil.rmtree(self.server.folder / "appendonlydir", ignore_errors=True)

    # store

    async def start_store(self) -> None:
        """The Mongo server, again after a kill; its data stays."""
        program = Path(self.mongo_program or "")
        data = self.folder / "store"
        data.mkdir(exist_ok=True)
        if program.name.startswith("secantusd"):
            argv = [str(program), "--host", HOST, "--port", str(self._mongo_port)]
            argv += ["--storage-path", str(data / "data"), "--cache-size", "128M"]
        else:
            argv = [str(program), "--bind_ip", HOST, "--port", str(self._mongo_port)]
            argv += ["--dbpath", str(data)]
        self._mongo = await spawn(argv, log=self.folder / "logs" / "mongo.log", name="mongo")
        if not await until(partial(listens, self._mongo_port), MONGO_READY_S):
            raise ProcessError(f"{program} did not start: {self._mongo.log_tail(5)}")

    def signal_store(self, number: signal.Signals) -> str:
        """To the Mongo server, else to the archiver, which is the SQLite store's only writer; says to whom."""
        if self._mongo is not None:
            self._mongo.send_signal(number)
            return "mongo"
        archiver = self.parts["archiver"]
        if archiver.process is not None:
            archiver.process.send_signal(number)
        return "archiver"

    async def kill_store(self) -> str:
        """Kill -9; says of whom."""
        if self._mongo is not None:
            self._mongo.send_signal(signal.SIGKILL)
            await self._mongo.wait(deadline=READY_S)
            return "mongo"
        await self.kill(self.parts["archiver"])
        return "archiver"

    async def restart_store(self) -> None:
        """After `kill_store`."""
        if self._mongo is not None:
            await self.start_store()
        else:
            await self.start(self.parts["archiver"])

    # disks

    def _mount_disks(self) -> None:
        """Two small disks, seen by this process and its children alone, gone when the last of them is."""
        if os.geteuid() != 0:
            self.no_disks = "only root can mount a small disk"
            return
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS):
            self.no_disks = f"no mount namespace: {os.strerror(ctypes.get_errno())}"
            return
        try:
            _command("mount", "--make-rprivate", "/")
            for name in ("server", "store"):
                place = self.folder / name
                place.mkdir(parents=True, exist_ok=True)
                _command("mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "chaos", str(place))
                self.disks[name] = place
        except (OSError, subprocess.CalledProcessError) as error:
            self.no_disks = f"can't mount a small disk: {error}"

    def unmount_disks(self) -> None:
        """Leave their files where they were seen."""
        for place in self.disks.values():
            copy = place.with_name(f"{place.name}-kept")
            shutil.copytree(place, copy, dirs_exist_ok=True)
            _command("umount", "-l", str(place))
            shutil.copytree(copy, place, dirs_exist_ok=True)
            shutil.rmtree(copy)
        self.disks.clear()

    # the end

    async def close(self, *, orderly: bool) -> None:
        """Stop everything."""
        for part in self.parts.values():
            if part.process is not None:
                self._doomed.add(part.process)
                part.process.send_signal(signal.SIGCONT)
        async with anyio.create_task_group() as group:
            for part in self.parts.values():
                if part.process is not None:
                    group.start_soon(partial(part.process.stop, grace=STOP_S if orderly else 0.0))
        await self._proxy.stop(grace=1.0)
        if self.server.process is not None:
            self.server.process.send_signal(signal.SIGCONT)
        await self.server.stop()
        if self._mongo is not None:
            self._mongo.send_signal(signal.SIGKILL)
            await self._mongo.stop(grace=1.0)

    def processes_left(self) -> int:
        """Processes of this run that are there: each carries its mark in its environment."""
        mark = self.place.run_id.encode()
        count = 0
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    count += mark in (entry / "environ").read_bytes()
                except OSError:  # it ended while we looked, or isn't ours
                    continue
        return count

    def _env(self) -> dict[str, str]:
        return {PLACE: self.place.model_dump_json()}


PARTS = {
    "archiver": 1,
    "tools": TOOL_WORKERS,
    "worker": WORKERS,
    "receiver": 1,
    "sender": 1,
    "submitter": 1,
}
"""Role → how many, in the order of their start."""


@asynccontextmanager
async def on_stage(
    folder: Path, seed: int, *, load: int, mongo_program: str | None, small_disks: bool
) -> AsyncGenerator[Stage]:
    """A stage with everything running; stopped at the end, however it comes."""
    async with anyio.create_task_group() as tasks:
        stage = Stage(folder, seed, load, mongo_program, tasks)
        try:
            await stage.open(small_disks=small_disks)
            yield stage
        finally:
            with anyio.CancelScope(shield=True):
                await stage.close(orderly=False)
                stage.unmount_disks()
            tasks.cancel_scope.cancel()


def faketime_library() -> Path | None:
    """The library that gives a process another clock, where the system has it."""
    return next(iter(sorted(Path("/usr/lib").glob(f"*/{LIBFAKETIME}"))), None)


def find_mongo(program: str) -> str | None:
    """The program, on the PATH or beside the interpreter; None where there is none."""
    places = os.pathsep.join((os.environ.get("PATH", ""), str(Path(sys.executable).parent)))
    return shutil.which(program, path=places)


async def until(ready: Callable[[], bool | Awaitable[bool]], patience_s: float = READY_S) -> bool:
    """Wait until it is so; False where it isn't after `patience_s`."""
    with anyio.move_on_after(patience_s):
        while True:
            answer = ready()
            if await answer if isawaitable(answer) else answer:
                return True
            await anyio.sleep(POLL_S)
    return False


def _command(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True, timeout=READY_S)
