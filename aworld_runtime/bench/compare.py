"""Other event buses beside ours: `aworld bench bus --peers`.

Each is a script in `peers/`, run by an interpreter that has the peer, one after another, with a server of its own on
this machine. What a script measures is in its first sentence; a peer that isn't there says what to install.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import anyio

from aworld_runtime.bench.cost import CpuSeconds
from aworld_runtime.bench.load import BODY_BYTES, Load
from aworld_runtime.bench.progress import Progress
from aworld_runtime.bus.server import PrivateServer
from aworld_runtime.errors import ConfigError, ProcessError
from aworld_runtime.messages import Data
from aworld_runtime.processes import HOST, ChildProcess, free_port, listens, spawn

SCRIPTS = Path(__file__).with_name("peers")
VENV = ".venv-peers"
EVENTS = 20_000
"""At most so many for a peer: the slowest need half a minute for them."""
DEADLINE_S = 240.0
READY_S = 10.0
INSTALL = "scripts/bench-peers"
MISSING = "ModuleNotFoundError"


@dataclass(frozen=True, slots=True)
class Peer:
    """A script, and what it stands for."""

    script: str
    server: Literal["redis", "nats"] | None
    networked: bool
    what: str


PEERS = {
    "faststream": Peer(
        "faststream_redis",
        "redis",
        True,
        "published to Redis streams in pipelines of 100, read by a consumer group in batches of 200, acked",
    ),
    "taskiq": Peer(
        "taskiq_streams",
        "redis",
        True,
        "kiq of a task to RedisStreamBroker, 64 at once; run by a receiver for each role, acked when done",
    ),
    "autogen-local": Peer(
        "autogen_local",
        None,
        False,
        "publish_message to a topic in one process, handled by a RoutedAgent; nothing is kept, nothing acked",
    ),
    "autogen-grpc": Peer(
        "autogen_grpc",
        None,
        True,
        "publish_message over a gRPC host to a worker's RoutedAgent; nothing is kept, nothing acked",
    ),
    "nats": Peer(
        "nats_jetstream",
        "nats",
        True,
        "publish_async to a JetStream on file storage, 64 at once; fetched 200 at a time from durable consumers, acked",
    ),
}


class PeerReport(Data):
    """Figures of one peer, or why there are none."""

    name: str
    networked: bool
    what: str
    """What was measured: its own way to be fast."""
    reason: str | None = None
    versions: str | None = None
    events: int = 0
    bytes: int = 0
    wall_s: float = 0.0
    cpu_s: CpuSeconds = CpuSeconds()
    events_per_core_second: float | None = None
    events_per_second: float | None = None


def chosen(names: str) -> list[str]:
    """The peers of `--peers NAMES`.

    Raises:
        ConfigError: there is none of that name.
    """
    if names == "all":
        return list(PEERS)
    found = [name.strip() for name in names.split(",") if name.strip()]
    if unknown := [name for name in found if name not in PEERS]:
        raise ConfigError(f"--peers {', '.join(unknown)}: there are {', '.join(PEERS)}")
    return found


def default_python() -> Path:
    """The checkout's interpreter for peers if it was made, else this one."""
    made = Path(__file__).parents[2] / VENV / "bin" / "python"
    return made if made.exists() else Path(sys.executable)


async def compare(
    names: Sequence[str], python: Path, load: Load, progress: Progress
) -> list[PeerReport]:
    """Run the peers one after another."""
    reports: list[PeerReport] = []
    for name in names:
        progress.say(f"peer {name}")
        with tempfile.TemporaryDirectory(prefix="aworld-bench-") as folder:
            reports.append(await _measure(name, python, load, Path(folder)))
    return reports


async def _measure(name: str, python: Path, load: Load, folder: Path) -> PeerReport:
    peer = PEERS[name]
    try:
        async with _server(peer, python, folder) as server:
            found = await _run(peer, python, load, folder, server)
    except (ConfigError, ProcessError) as error:
        return PeerReport(name=name, networked=peer.networked, what=peer.what, reason=str(error))
    cpu_s = CpuSeconds(client=found["client_cpu_s"], server=found["server_cpu_s"])
    return PeerReport(
        name=name,
        networked=peer.networked,
        what=peer.what,
        versions=found["versions"],
        events=found["events"],
        bytes=found["bytes"],
        wall_s=found["wall_s"],
        cpu_s=cpu_s,
        events_per_core_second=found["events"] / cpu_s.total,
        events_per_second=found["events"] / found["wall_s"],
    )


async def _run(
    peer: Peer, python: Path, load: Load, folder: Path, server: Sequence[str]
) -> dict[str, Any]:
    command = [str(python), str(SCRIPTS / f"{peer.script}.py"), *server]
    numbers = (
        ("events", min(load.events, EVENTS)),
        ("bytes", BODY_BYTES),
        ("roles", load.roles),
        ("episodes", load.episodes),
        ("publishers", load.publishers),
    )
    command += [part for name, value in numbers for part in (f"--{name}", str(value))]
    # Not this product's path: the peers' interpreter may hold other versions of what it needs.
    quiet = {"PYTHONPATH": None}
    async with await spawn(command, log=folder / "peer.log", env=quiet, name=peer.script) as child:
        code = await child.wait(deadline=DEADLINE_S)
        said = child.log_tail(5)
    if MISSING in said:
        raise ConfigError(f"not installed for {python}: make it with {INSTALL}")
    if code:
        raise ProcessError(f"{peer.script} ended with code {code}; its last lines:\n{said}")
    return cast("dict[str, Any]", json.loads(said.splitlines()[-1]))


@asynccontextmanager
async def _server(peer: Peer, python: Path, folder: Path) -> AsyncGenerator[list[str]]:
    """The arguments that tell a script of its server."""
    if peer.server is None:
        yield []
    elif peer.server == "redis":
        async with PrivateServer(folder / "redis") as server:
            pid = server.process.pid if server.process else 0
            yield ["--url", server.url, "--server-pid", str(pid)]
    else:
        async with _nats(python, folder) as (process, port):
            yield ["--url", f"nats://{HOST}:{port}", "--server-pid", str(process.pid)]


@asynccontextmanager
async def _nats(python: Path, folder: Path) -> AsyncGenerator[tuple[ChildProcess, int]]:
    binary = shutil.which("nats-server") or shutil.which("nats-server", path=str(python.parent))
    if binary is None:
        raise ConfigError(f"no nats-server: install Debian's package, or run {INSTALL}")
    port = free_port()
    command = [binary, "-js", "-sd", str(folder / "nats"), "-a", HOST, "-p", str(port)]
    async with await spawn(command, log=folder / "nats.log") as process:
        with anyio.move_on_after(READY_S):
            while not await listens(port):  # noqa: ASYNC110 - it tells nobody
                await anyio.sleep(0.05)
        yield process, port
