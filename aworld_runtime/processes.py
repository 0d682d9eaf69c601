"""Programs we start and that never outlive us: workers, a private server, samplers, learner ranks.

`spawn` puts a `guardian` between us and the program. Whatever ends this process, kill -9 included,
the program and all its descendants end too; the thread that called `spawn` may end without
consequence. Output goes to a log file.

    async with await spawn(["redis-server", "--port", "0"], log=folder / "redis.log") as server:
        ...
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import anyio

from aworld_runtime.errors import ProcessError

HOST = "127.0.0.1"
PORTS = range(20_000, 32_000)
"""Below the range that the kernel gives to outgoing connections: a client that reconnects to a dead
local server on a port of that range may get connected to itself, and then holds the server's port."""
GUARDIAN = Path(__file__).with_name("guardian.py")
START_DEADLINE = 30.0
"""Seconds for the guardian to report the program's id; it takes milliseconds on a calm machine."""
KILL_DEADLINE = 2.0
"""Seconds for the guardian to kill the tree, before its process group is killed with it."""
TAIL_BYTES = 64 * 1024
RELEASE_S = 5.0
"""Seconds in which a program that is being killed lets go of its port."""


class ChildProcess:
    """A running program and its guardian. Leaving `async with` stops it."""

    def __init__(
        self, guardian: subprocess.Popen[bytes], *, pid: int, name: str, log: Path
    ) -> None:
        self._guardian = guardian
        self.pid = pid
        """The program's own process id, not the guardian's."""
        self.name = name
        self.log = log

    @property
    def returncode(self) -> int | None:
        """None while it runs; a negative one is a signal. By then its whole tree has ended."""
        if self._guardian.returncode is None and self._ended():
            # A killed guardian could not clean up: kill the group before its id can be reused.
            _kill_group(self._guardian.pid)
            self._guardian.wait()
        return self._guardian.returncode

    async def wait(self, *, deadline: float | None = None) -> int:
        """Wait until the program and its tree have ended; `ProcessError` after `deadline` seconds."""
        with anyio.move_on_after(deadline):
            await self._wait_for_guardian()
        code = self.returncode
        if code is None:
            raise ProcessError(
                f"{self.name} (pid {self.pid}) still runs after {deadline} s; log: {self.log}"
            )
        return code

    async def stop(self, *, grace: float = 5.0) -> int:
        """SIGTERM to the program, SIGKILL to its tree after `grace` seconds. May be called again."""
        with anyio.CancelScope(shield=True):
            for number, seconds in ((signal.SIGTERM, grace), (signal.SIGQUIT, KILL_DEADLINE)):
                if self.returncode is not None:
                    break
                self._guardian.send_signal(number)
                with anyio.move_on_after(seconds):
                    await self._wait_for_guardian()
            if self.returncode is None:
                _kill_group(self._guardian.pid)
                await self._wait_for_guardian()
        return await self.wait()

    def send_signal(self, number: signal.Signals) -> None:
        """Send to the program alone; nothing if it has ended."""
        if self.returncode is None:
            with suppress(ProcessLookupError):  # it has ended, and its guardian has yet to say so
                os.kill(self.pid, number)

    def log_tail(self, lines: int = 20) -> str:
        """The last lines it wrote; none where its log was removed."""
        try:
            file = self.log.open("rb")
        except FileNotFoundError:
            return ""
        with file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    def _ended(self) -> bool:
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self._guardian.pid, flags) is not None

    async def _wait_for_guardian(self) -> None:
        if self.returncode is not None:
            return
        try:
            # One descriptor for each waiter: an event loop watches a descriptor for one task only.
            guardian = os.pidfd_open(self._guardian.pid)
        except (OSError, AttributeError):  # an old kernel
            while self.returncode is None:  # noqa: ASYNC110 - nothing else to wait on
                await anyio.sleep(0.05)
            return
        try:
            await anyio.wait_readable(guardian)
        finally:
            os.close(guardian)


async def spawn(
    argv: Sequence[str | Path],
    *,
    log: Path,
    env: Mapping[str, str | None] | None = None,
    cwd: Path | None = None,
    name: str | None = None,
) -> ChildProcess:
    """Start a program that ends with us, its output appended to `log`.

    `env` is laid over this process's environment; None removes a name. `name` is what errors call
    it. Raises `ProcessError` when it can't be executed.
    """
    program = [str(part) for part in argv]
    environment = {
        key: value for key, value in {**os.environ, **(env or {})}.items() if value is not None
    }
    log.parent.mkdir(parents=True, exist_ok=True)
    read_end, write_end = os.pipe()
    try:
        with log.open("ab") as output:
            guardian = subprocess.Popen(  # noqa: ASYNC220 - milliseconds; no thread may own it
                [
                    sys.executable,
                    "-I",
                    "-S",
                    str(GUARDIAN),
                    str(os.getpid()),
                    str(write_end),
                    *program,
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                cwd=cwd,
                pass_fds=(write_end,),
                start_new_session=True,
            )
    except OSError as error:
        os.close(read_end)
        raise ProcessError(f"cannot start {program[0]}: {error.strerror}") from error
    finally:
        os.close(write_end)
    name = name or Path(program[0]).name
    try:
        pid = await _read_report(read_end, program[0])
    except BaseException:
        _kill_group(guardian.pid)
        guardian.wait()
        raise
    finally:
        os.close(read_end)
    return ChildProcess(guardian, pid=pid, name=name, log=log)


async def _read_report(read_end: int, program: str) -> int:
    """The program's id. The pipe closes by itself when the program is executed."""
    report = b""
    with anyio.move_on_after(START_DEADLINE):
        while True:
            await anyio.wait_readable(read_end)
            chunk = os.read(read_end, 4096)
            if not chunk:
                break
            report += chunk
    words = dict(line.split(" ", 1) for line in report.decode().splitlines())
    if "error" in words:
        raise ProcessError(f"cannot start {program}: {words['error']}")
    if "pid" not in words:
        raise ProcessError(f"cannot start {program}: no report within {START_DEADLINE} s")
    return int(words["pid"])


def port_is_free(port: int, host: str = HOST) -> bool:
    """Whether a program of ours could listen there: on a port of this machine's address `host`."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # old connections don't count
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


async def until_port_is_free(port: int, host: str = HOST, *, patience_s: float = RELEASE_S) -> bool:
    """Wait for a program that is being killed to let go of the port; whether it has."""
    with anyio.move_on_after(patience_s):
        while not port_is_free(port, host):  # noqa: ASYNC110 - the kernel tells nobody
            await anyio.sleep(0.05)
    return port_is_free(port, host)


async def listens(port: int) -> bool:
    """Whether somebody takes connections there."""
    try:
        stream = await anyio.connect_tcp(HOST, port)
    except OSError:
        return False
    await stream.aclose()
    return True


def free_port() -> int:
    """A port that nobody listens on now.

    Raises:
        ProcessError: there is none.
    """
    # The system's own chance: programs that set the same seed don't meet at the same port.
    for port in random.SystemRandom().sample(PORTS, 200):
        if port_is_free(port):
            return port
    raise ProcessError(f"no free port on {HOST} between {PORTS.start} and {PORTS.stop}")


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return
