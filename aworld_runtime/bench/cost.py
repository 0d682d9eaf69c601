"""What a phase costs: wall time, and the CPU seconds of every process that takes part in it."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from aworld_runtime.messages import Data

PAGE = os.sysconf("SC_PAGE_SIZE")


class CpuSeconds(Data):
    """User and system time, all threads."""

    client: float = 0.0
    """This process: publishers, consumers and the bus's own tasks and threads."""
    server: float = 0.0
    """The server and its children; 0 where there is none."""

    @property
    def total(self) -> float:
        return self.client + self.server


class Meter:
    """Sums up wall and CPU time over the stretches that count."""

    def __init__(self, server_cpu_s: Callable[[], Awaitable[float]] | None = None) -> None:
        self.wall_s = 0.0
        self.client_s = 0.0
        self.server_s = 0.0
        self._server_cpu_s = server_cpu_s

    @property
    def cpu(self) -> CpuSeconds:
        return CpuSeconds(client=self.client_s, server=self.server_s)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """What happens inside counts."""
        server = await self._server()
        wall, client = time.perf_counter(), time.process_time()
        yield
        self.client_s += time.process_time() - client
        self.wall_s += time.perf_counter() - wall
        self.server_s += await self._server() - server

    async def _server(self) -> float:
        return await self._server_cpu_s() if self._server_cpu_s else 0.0


def rss_bytes() -> int:
    """Memory of this process that is in RAM."""
    with open("/proc/self/statm") as file:  # noqa: PTH123 - sampled often
        return int(file.read().split()[1]) * PAGE
