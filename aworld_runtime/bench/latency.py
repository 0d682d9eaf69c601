"""The latency phase: single events at a steady rate, each timed from before it is sent until a consumer has it.

    sender of a role, every `roles / rate` s:  clock ─▶ send(event) ──▶ the role's consumer ─▶ clock

What sends and receives is a `Transport`: the bus, or redis-py alone (`raw`), measured alike. Senders take turns, so that
one that is held up holds up only its own role; how late they began is said too (`late_p99_ms`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import anyio
from anyio.abc import TaskGroup

from aworld_runtime.bench.load import Writer, queue_name, role_name
from aworld_runtime.bus.base import Bus, Consumer
from aworld_runtime.errors import ConfigError
from aworld_runtime.events import Event
from aworld_runtime.messages import Data
from aworld_runtime.names import episode_log

WARM_UP_S = 0.3
"""Sent before and not counted: connections are made, code is loaded."""
ARRIVE_S = 10.0
"""Seconds to wait for the last events."""
SLICE_S = 1.0
"""Length of the alternating parts of a comparison, so that a busy moment of the machine hits both."""


class Pace(Data):
    """Settings of the phase."""

    rate: int = 1000
    """Events per second, all roles together."""
    seconds: float = 10.0
    roles: int = 10

    def check(self) -> None:
        """See whether it can be run.

        Raises:
            ConfigError: a rate, or a time, that measures nothing.
        """
        if self.rate < 1 or self.seconds <= 0:
            raise ConfigError(f"--rate {self.rate} --seconds {self.seconds}: expected more than 0")


class Latency(Data):
    """Figures of the phase, in milliseconds."""

    samples: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    late_p99_ms: float
    """How long after its time an event was begun to be sent."""


class Transport(Protocol):
    """Brings events to the consumer of a role."""

    async def send(self, role: str, event: Event) -> None: ...

    async def receive(
        self, role: str, joined: Callable[[], None], arrived: Callable[[Sequence[str]], None]
    ) -> None:
        """Join as the role's consumer, say so, then tell the ids of what comes, as it comes, for ever."""
        ...


class BusTransport:
    """An event's whole way: the append to its episode's log, and the put to the role's queue."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._seqs: dict[str, int] = {}

    async def send(self, role: str, event: Event) -> None:
        log = episode_log(event.episode_id or "")
        self._seqs[log] = await self._bus.append(log, self._seqs.get(log, 0), [event])
        await self._bus.put(queue_name(role), event)

    async def receive(
        self, role: str, joined: Callable[[], None], arrived: Callable[[Sequence[str]], None]
    ) -> None:
        consumer: Consumer
        async with self._bus.consume(queue_name(role), consumer="bench", credit=100) as consumer:
            joined()
            while True:
                deliveries = await consumer.take_many(100)
                arrived([delivery.event.id for delivery in deliveries])
                await consumer.ack(deliveries)

    async def forget(self) -> None:
        """Free the logs that it has written."""
        for log in self._seqs:
            await self._bus.unlink(log, keep_s=0)


class Stopwatch:
    """When each event was sent, and how long it took."""

    def __init__(self) -> None:
        self.counting = False
        self.took_s: list[float] = []
        self.late_s: list[float] = []
        self.on_their_way: dict[str, float] = {}

    def send(self, event_id: str, due: float) -> None:
        now = time.perf_counter()
        self.on_their_way[event_id] = now
        if self.counting:
            self.late_s.append(now - due)

    def arrived(self, ids: Sequence[str]) -> None:
        now = time.perf_counter()
        for event_id in ids:
            sent = self.on_their_way.pop(event_id, None)
            if sent is not None and self.counting:
                self.took_s.append(now - sent)

    def figures(self) -> Latency:
        return Latency(
            samples=len(self.took_s),
            p50_ms=percentile(self.took_s, 50) * 1000,
            p99_ms=percentile(self.took_s, 99) * 1000,
            max_ms=max(self.took_s, default=math.nan) * 1000,
            late_p99_ms=percentile(self.late_s, 99) * 1000,
        )


class LatencyPhase:
    """Sends at the pace over one transport; several calls of `run` add up."""

    def __init__(self, transport: Transport, pace: Pace, *, name: str) -> None:
        self.watch = Stopwatch()
        self._transport = transport
        self._pace = pace
        self._name = name
        self._writer = Writer()

    async def run(self, seconds: float) -> list[str]:
        """Measure for so long; returns what went wrong."""
        roles = [role_name(index) for index in range(self._pace.roles)]
        faults: list[str] = []
        async with anyio.create_task_group() as receiving:
            for role in roles:
                await _joined(receiving, self._transport, role, self.watch)
            await self._send_all(roles, WARM_UP_S)
            self.watch.counting = True
            await self._send_all(roles, seconds)
            faults = await self._all_arrived()
            self.watch.counting = False
            receiving.cancel_scope.cancel()
        return faults

    async def _send_all(self, roles: Sequence[str], seconds: float) -> None:
        start = time.perf_counter()
        async with anyio.create_task_group() as senders:
            for index in range(len(roles)):
                senders.start_soon(self._send_paced, roles, index, start, seconds)

    async def _send_paced(
        self, roles: Sequence[str], index: int, start: float, seconds: float
    ) -> None:
        role, number = roles[index], index
        while (due := start + number / self._pace.rate) < start + seconds:
            await anyio.sleep(max(due - time.perf_counter(), 0))
            event = self._writer.event(f"{self._name}-{role}", role)
            self.watch.send(event.id, due)
            await self._transport.send(role, event)
            number += len(roles)

    async def _all_arrived(self) -> list[str]:
        with anyio.move_on_after(ARRIVE_S):
            while self.watch.on_their_way:  # noqa: ASYNC110 - they come one by one
                await anyio.sleep(0.01)
        lost = len(self.watch.on_their_way)
        self.watch.on_their_way.clear()
        return [f"{self._name}: {lost} events did not arrive within {ARRIVE_S:.0f} s"] * bool(lost)


async def alternate(
    phases: Sequence[LatencyPhase], seconds: float, say: Callable[[str], None]
) -> list[str]:
    """Give each phase `seconds`, in slices, one phase after another; returns what went wrong."""
    faults: list[str] = []
    slices = max(round(seconds / SLICE_S), 1)
    for number in range(slices):
        for phase in phases:
            faults += await phase.run(seconds / slices)
        say(f"latency: {number + 1} of {slices} slices")
    return faults


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent of all don't exceed; NaN of none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(math.ceil(len(ordered) * percent / 100) - 1, 0)]


async def _joined(receiving: TaskGroup, transport: Transport, role: str, watch: Stopwatch) -> None:
    joined = anyio.Event()
    receive: Callable[..., Awaitable[None]] = transport.receive
    receiving.start_soon(receive, role, joined.set, watch.arrived)
    await joined.wait()
