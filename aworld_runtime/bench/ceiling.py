"""The ceiling: what the server takes from its own benchmark program, which does nothing but XADD."""

from __future__ import annotations

import csv
import io
import resource
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

import anyio

from aworld_runtime.bench.load import BODY_BYTES
from aworld_runtime.messages import Data

PROGRAMS = ("valkey-benchmark", "redis-benchmark")
CLIENTS = 10
PIPELINE = 100
DEADLINE_S = 120.0


class Ceiling(Data):
    """Figures of the program, or why there are none."""

    reason: str | None = None
    program: str | None = None
    events: int = 0
    per_second: float | None = None
    per_core_second: float | None = None
    """Over the CPU seconds of both sides, as for the bus."""
    per_server_core_second: float | None = None
    """Over the server's alone."""


async def measure_ceiling(
    url: str, stream: str, events: int, server_cpu_s: Callable[[], Awaitable[float]]
) -> Ceiling:
    """Add so many 1 KB entries to one stream, pipelined over a few connections."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        return Ceiling(reason=f"no {' or '.join(PROGRAMS)} on the PATH")
    parts = urlsplit(url)
    if parts.scheme != "redis" or parts.password:
        return Ceiling(reason="measured only over redis:// and without a password")
    command = [program, "-h", parts.hostname or "127.0.0.1", "-p", str(parts.port or 6379)]
    command += ["-n", str(events), "-c", str(CLIENTS), "-P", str(PIPELINE), "--csv"]
    command += ["XADD", stream, "*", "e", "x" * BODY_BYTES]
    server, client = await server_cpu_s(), _children_cpu_s()
    try:
        with anyio.fail_after(DEADLINE_S):
            done = await anyio.run_process(command, check=False)
    except TimeoutError:
        return Ceiling(reason=f"{program} took longer than {DEADLINE_S:.0f} s")
    if done.returncode:
        return Ceiling(reason=f"{program} failed: {done.stderr.decode(errors='replace')[:200]}")
    server, client = await server_cpu_s() - server, _children_cpu_s() - client
    return Ceiling(
        program=Path(program).name,
        events=events,
        per_second=_rate(done.stdout.decode()),
        per_core_second=events / (server + client),
        per_server_core_second=events / server,
    )


def _rate(text: str) -> float | None:
    """Requests per second, the second column of the last row."""
    rows = [row for row in csv.reader(io.StringIO(text)) if len(row) > 1]
    try:
        return float(rows[-1][1])
    except (IndexError, ValueError):
        return None


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
