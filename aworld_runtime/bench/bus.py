"""`aworld bench bus`: the phases one after another on one bus, and their report."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlencode, urlsplit

from aworld_runtime.bench import targets
from aworld_runtime.bench.ceiling import Ceiling, measure_ceiling
from aworld_runtime.bench.compare import PeerReport, compare
from aworld_runtime.bench.cost import CpuSeconds, Meter
from aworld_runtime.bench.latency import BusTransport, Latency, LatencyPhase, Pace, alternate
from aworld_runtime.bench.load import Load, Writer, role_name
from aworld_runtime.bench.progress import Progress
from aworld_runtime.bench.targets import Hold
from aworld_runtime.bench.throughput import Throughput, ThroughputPhase
from aworld_runtime.bus.base import Bus
from aworld_runtime.bus.open import open_bus
from aworld_runtime.bus.server import PrivateServer
from aworld_runtime.errors import ConfigError
from aworld_runtime.events import Registry
from aworld_runtime.messages import Data
from aworld_runtime.urls import shown

if TYPE_CHECKING:
    from aworld_runtime.bench.raw import RawServer

CEILING_EVENTS = 200_000


class Machine(Data):
    """Where it was measured."""

    python: str
    cpu_count: int
    load_average: float
    """Of the minute before; above 0.5 somebody else was working too."""

    @classmethod
    def this(cls) -> Machine:
        return cls(
            python=platform.python_version(),
            cpu_count=len(os.sched_getaffinity(0)),
            load_average=os.getloadavg()[0],
        )


class BusReport(Data):
    """What `aworld bench bus --json` prints."""

    events_per_core_second: float
    """Acknowledged events over the CPU seconds of all processes, the server's included."""
    events_per_second: float
    p50_ms: float
    p99_ms: float
    raw_p50_ms: float | None
    raw_p99_ms: float | None
    ceiling_events_per_core_second: float | None
    url: str
    server: str | None
    events: int
    roles: int
    episodes: int
    bytes: int
    """Of an event's encoded body."""
    wall_s: float
    cpu_s: CpuSeconds
    throughput: Throughput
    latency: Latency
    raw_latency: Latency | None
    ceiling: Ceiling
    load: Load
    pace: Pace
    machine: Machine
    peers: tuple[PeerReport, ...]
    holds: tuple[Hold, ...]
    verified: bool
    faults: tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """A bus to measure, under a namespace of the benchmark's own."""

    url: str
    namespace: str | None


@asynccontextmanager
async def place(url: str | None) -> AsyncGenerator[Place]:
    """The bus at `url`; without one, a private server in a folder that is gone afterwards."""
    if url is None:
        with tempfile.TemporaryDirectory(prefix="aworld-bench-") as folder:
            async with PrivateServer(Path(folder)) as server:
                yield _apart(server.url)
    elif urlsplit(url).scheme == "memory":
        yield Place(url, None)
    else:
        yield _apart(url)


def _apart(url: str) -> Place:
    """Away from whatever else is on the server."""
    parts = urlsplit(url)
    if parts.scheme.partition("+")[0] not in ("redis", "rediss", "unix"):
        raise ConfigError(
            f"bench: can't measure {shown(url)!r}: expected redis://…, rediss://…, unix://…, redis+cluster://… or"
            " memory://"
        )
    given = dict(parse_qsl(parts.query)).get("namespace", "aworld")
    namespace = f"{given}-bench-{token_hex(4)}"
    return Place(with_option(url, "namespace", namespace), namespace)


def with_option(url: str, name: str, value: str) -> str:
    """A bus URL with this parameter."""
    base, _, query = url.partition("?")
    return f"{base}?{urlencode({**dict(parse_qsl(query)), name: value})}"


@dataclass(frozen=True)
class Settings:
    """What is measured, and how."""

    load: Load
    pace: Pace
    progress: Progress
    peers: Sequence[str] = ()
    peers_python: Path = Path(sys.executable)


@dataclass(frozen=True)
class Measured:
    """What came out."""

    throughput: Throughput
    latency: Latency
    raw_latency: Latency | None
    ceiling: Ceiling
    server: str | None
    faults: list[str]


async def bench_bus(url: str | None, settings: Settings) -> BusReport:
    """Run all phases."""
    settings.load.check()
    settings.pace.check()
    machine = Machine.this()
    async with AsyncExitStack() as stack:
        where = await stack.enter_async_context(place(url))
        bus = await stack.enter_async_context(open_bus(where.url))
        if where.namespace is None:
            measured = await _measure_alone(bus, settings)
        else:
            from aworld_runtime.bench.raw import raw_server

            server = await stack.enter_async_context(raw_server(where.url))
            measured = await _measure_beside(bus, where.url, server, settings)
    peers = await compare(settings.peers, settings.peers_python, settings.load, settings.progress)
    return _report(bus.url, machine, settings, measured, peers)


async def _measure_alone(bus: Bus, settings: Settings) -> Measured:
    """A bus without a server."""
    throughput = await _throughput(bus, Meter(), settings, "in this process")
    transport = BusTransport(bus)
    ours = LatencyPhase(transport, settings.pace, name="bus")
    faults = await alternate([ours], settings.pace.seconds, settings.progress.tick)
    await transport.forget()
    ceiling = Ceiling(reason=f"{bus.url} has no server")
    return Measured(throughput, ours.watch.figures(), None, ceiling, None, faults)


async def _measure_beside(bus: Bus, url: str, server: RawServer, settings: Settings) -> Measured:
    """A bus on a server, and that server without it."""
    name = await server.name()
    throughput = await _throughput(bus, Meter(server.cpu_s), settings, name)
    transport = BusTransport(bus)
    ours = LatencyPhase(transport, settings.pace, name="bus")
    async with server.transport() as beside:
        raw = LatencyPhase(beside, settings.pace, name="raw")
        faults = await alternate([ours, raw], settings.pace.seconds, settings.progress.tick)
    await transport.forget()
    settings.progress.say("ceiling: the server's own benchmark program")
    events = min(settings.load.events, CEILING_EVENTS)
    ceiling = await measure_ceiling(url, f"{server.namespace}:ceiling", events, server.cpu_s)
    return Measured(throughput, ours.watch.figures(), raw.watch.figures(), ceiling, name, faults)


async def _throughput(bus: Bus, meter: Meter, settings: Settings, where: str) -> Throughput:
    settings.progress.say(f"{bus.url} ({where}): {settings.load.events:,} events")
    return await ThroughputPhase(bus, settings.load, meter, settings.progress).run()


def _report(
    url: str, machine: Machine, settings: Settings, measured: Measured, peers: Sequence[PeerReport]
) -> BusReport:
    throughput, latency, raw = measured.throughput, measured.latency, measured.raw_latency
    faults = (*throughput.faults, *measured.faults)
    return BusReport(
        events_per_core_second=throughput.per_core_second,
        events_per_second=throughput.per_second,
        p50_ms=latency.p50_ms,
        p99_ms=latency.p99_ms,
        raw_p50_ms=raw and raw.p50_ms,
        raw_p99_ms=raw and raw.p99_ms,
        ceiling_events_per_core_second=measured.ceiling.per_core_second,
        url=url,
        server=measured.server,
        events=throughput.events,
        roles=settings.load.roles,
        episodes=settings.load.episodes,
        bytes=_body_bytes(),
        wall_s=throughput.wall_s,
        cpu_s=throughput.cpu,
        throughput=throughput,
        latency=latency,
        raw_latency=raw,
        ceiling=measured.ceiling,
        load=settings.load,
        pace=settings.pace,
        machine=machine,
        peers=tuple(peers),
        holds=tuple(_holds(measured, peers)),
        verified=not faults,
        faults=faults,
    )


def _holds(measured: Measured, peers: Sequence[PeerReport]) -> Iterator[Hold]:
    ours, latency, raw = measured.throughput, measured.latency, measured.raw_latency
    on_server = measured.server is not None
    wanted = targets.REDIS_PER_CORE_SECOND if on_server else targets.MEMORY_PER_CORE_SECOND
    yield targets.at_least("events_per_core_second", ours.per_core_second, wanted)
    yield targets.at_most("p50_ms", latency.p50_ms, targets.P50_MS, "ms")
    yield targets.p99(latency.p99_ms, raw and raw.p99_ms)
    for peer in peers:
        if on_server and peer.networked:
            theirs = peer.events_per_core_second
            times = ours.per_core_second / theirs if theirs else None
            yield targets.times_a_peer(peer.name, times)


def _body_bytes() -> int:
    return len(Registry().encode(Writer().event("00000-00000", role_name(0))))
