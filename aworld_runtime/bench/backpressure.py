"""`aworld bench backpressure`: a load that its consumer can't follow, for minutes, and the memory meanwhile.

    publishers ─ put, `rate` a second ─▶ queue, at most `limit` ─▶ a consumer that takes `pace` a second
         └── wait and put again ◀── QueueFullError

Every publisher numbers its events, and the consumer expects the numbers one after another: what is trimmed, lost or
doubled shows at once, without a memory of what there was.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial

import anyio

from aworld_runtime.bench import targets
from aworld_runtime.bench.bus import Machine, place, with_option
from aworld_runtime.bench.cost import rss_bytes
from aworld_runtime.bench.load import Writer, queue_name
from aworld_runtime.bench.progress import Progress
from aworld_runtime.bench.targets import Hold
from aworld_runtime.bus.base import Bus
from aworld_runtime.bus.open import open_bus
from aworld_runtime.bus.room import when_there_is_room
from aworld_runtime.errors import ConfigError, QueueFullError
from aworld_runtime.events import Event
from aworld_runtime.messages import Data

ROLE = "slow"
PUBLISHER = "publisher"
SAMPLE_S = 1.0
DRAIN_S = 60.0
"""Seconds for what is left at the end."""


class Pressure(Data):
    """The load."""

    seconds: float = 300.0
    rate: int = 1000
    """Events a second that the publishers want to put."""
    pace: int = 200
    """Events a second that the consumer handles."""
    limit: int = 5000
    """Watermark of the queue."""
    publishers: int = 4
    batch: int = 20

    def check(self) -> None:
        """See whether it can be run.

        Raises:
            ConfigError: a number that makes no load.
        """
        for name, value in self:
            if value <= 0:
                raise ConfigError(f"backpressure: {name}={value}: expected more than 0")


class Slope(Data):
    """How memory changed, by least squares over the second half of the time."""

    kb_per_s: float
    first_mb: float
    """At the beginning of that half."""
    last_mb: float


class BackpressureReport(Data):
    """What `aworld bench backpressure --json` prints."""

    server_kb_per_s: float | None
    client_kb_per_s: float
    put: int
    """Events that the queue accepted."""
    refused: int
    """Puts that it refused, each of which was made again later."""
    consumed: int
    redelivered: int
    backlog_max: int
    url: str
    server: str | None
    server_memory: Slope | None
    """What its allocator has given out."""
    client_memory: Slope
    """Of this process, in RAM."""
    samples: int
    pressure: Pressure
    machine: Machine
    holds: tuple[Hold, ...]
    verified: bool
    faults: tuple[str, ...]


class Samples:
    """Memory, once a second."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.server: list[float] = []
        self.client: list[float] = []
        self.backlog: list[int] = []

    async def take(self, bus: Bus, server_memory: Callable[[], Awaitable[int]] | None) -> None:
        """Look once."""
        self.times.append(time.monotonic())
        self.client.append(rss_bytes() / 1024)
        self.backlog.append(await bus.backlog(queue_name(ROLE)))
        if server_memory is not None:
            self.server.append(await server_memory() / 1024)

    def slope(self, values: list[float]) -> Slope:
        half = len(values) // 2
        late = values[half:]
        return Slope(
            kb_per_s=least_squares(self.times[half:], late),
            first_mb=late[0] / 1024,
            last_mb=late[-1] / 1024,
        )


class Numbers:
    """The number that each publisher's next event must have."""

    def __init__(self) -> None:
        self.expected: dict[str, int] = {}
        self.consumed = 0
        self.redelivered = 0
        self.faults: list[str] = []

    def add(self, event: Event) -> None:
        publisher, number = event.source, int(event.episode_id or 0)
        expected = self.expected.get(publisher, 1)
        if number < expected:
            self.redelivered += 1
            return
        if number > expected:
            lost = f"events {expected} to {number - 1} of {publisher} never came"
            self.faults.append(lost)
        self.expected[publisher] = number + 1
        self.consumed += 1


class BackpressureBench:
    """Runs one load."""

    def __init__(self, url: str | None, pressure: Pressure, progress: Progress) -> None:
        pressure.check()
        self._url = url
        self._pressure = pressure
        self._progress = progress
        self._samples = Samples()
        self._numbers = Numbers()
        self._put: dict[str, int] = {}
        self._refused = 0
        self._fast = False

    async def run(self) -> BackpressureReport:
        """Press for the time, then take all that is left, and compare."""
        machine = Machine.this()
        async with AsyncExitStack() as stack:
            where = await stack.enter_async_context(place(self._url))
            url = with_option(where.url, "queue_limit", str(self._pressure.limit))
            bus = await stack.enter_async_context(open_bus(url))
            name, memory = None, None
            if where.namespace is not None:
                from aworld_runtime.bench.raw import raw_server

                server = await stack.enter_async_context(raw_server(where.url))
                name, memory = await server.name(), server.memory
            await self._press(bus, memory)
            left = await bus.backlog(queue_name(ROLE))
        return self._report(bus.url, name, machine, self._faults(left))

    async def _press(self, bus: Bus, memory: Callable[[], Awaitable[int]] | None) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._consume, bus)
            with anyio.move_on_after(self._pressure.seconds):
                async with anyio.create_task_group() as loads:
                    loads.start_soon(self._sample, bus, memory)
                    for number in range(self._pressure.publishers):
                        loads.start_soon(self._publish, bus, f"{PUBLISHER}/{number}")
            self._fast = True
            self._progress.say("what is left is consumed")
            with anyio.move_on_after(DRAIN_S):
                while await bus.backlog(queue_name(ROLE)):  # noqa: ASYNC110 - the server tells nobody
                    await anyio.sleep(0.05)
            tasks.cancel_scope.cancel()

    async def _publish(self, bus: Bus, source: str) -> None:
        """Put batches at a steady rate; slower where the queue is full."""
        pressure, writer = self._pressure, Writer()
        every_s = pressure.batch * pressure.publishers / pressure.rate
        due = time.monotonic()
        while True:
            first = self._put.get(source, 0) + 1
            events = [
                writer.event(str(number), ROLE).model_copy(
                    update={"source": source, "role": PUBLISHER}
                )
                for number in range(first, first + pressure.batch)
            ]
            with anyio.CancelScope(shield=True):  # whether it was put must be known
                await self._put_once(bus, source, events)
            due = max(due + every_s, time.monotonic() - every_s)
            await anyio.sleep(max(due - time.monotonic(), 0))

    async def _put_once(self, bus: Bus, source: str, events: list[Event]) -> None:
        put = partial(bus.put, queue_name(ROLE), *events)

        async def counted() -> None:
            try:
                await put()
            except QueueFullError:
                self._refused += 1
                raise

        await when_there_is_room(counted, who=source)
        self._put[source] = self._put.get(source, 0) + len(events)

    async def _consume(self, bus: Bus) -> None:
        batch, pace = self._pressure.batch, self._pressure.pace
        async with bus.consume(queue_name(ROLE), consumer="bench", credit=batch) as consumer:
            while True:
                deliveries = await consumer.take_many(batch)
                for delivery in deliveries:
                    self._numbers.add(delivery.event)
                if not self._fast:
                    await anyio.sleep(len(deliveries) / pace)
                await consumer.ack(deliveries)

    async def _sample(self, bus: Bus, memory: Callable[[], Awaitable[int]] | None) -> None:
        while True:
            await self._samples.take(bus, memory)
            put, backlog = sum(self._put.values()), self._samples.backlog[-1]
            self._progress.tick(
                f"put {put:,}, refused {self._refused:,}, consumed {self._numbers.consumed:,}, in the queue {backlog:,}"
            )
            await anyio.sleep(SAMPLE_S)

    def _faults(self, left: int) -> list[str]:
        put, consumed = sum(self._put.values()), self._numbers.consumed
        faults = list(self._numbers.faults)
        if put != consumed + left:
            faults.append(f"{put} events were put, {consumed} consumed, and {left} are still there")
        if left:
            faults.append(f"{left} events were not consumed within {DRAIN_S:.0f} s afterwards")
        return faults

    def _report(
        self, url: str, server: str | None, machine: Machine, faults: list[str]
    ) -> BackpressureReport:
        samples = self._samples
        on_server = samples.slope(samples.server) if samples.server else None
        here = samples.slope(samples.client)
        holds = [targets.at_most("client_kb_per_s", here.kb_per_s, targets.FLAT_KB_PER_S, "KB/s")]
        if on_server is not None:
            slope = on_server.kb_per_s
            flat = targets.at_most("server_kb_per_s", slope, targets.FLAT_KB_PER_S, "KB/s")
            holds.insert(0, flat)
        return BackpressureReport(
            server_kb_per_s=on_server and on_server.kb_per_s,
            client_kb_per_s=here.kb_per_s,
            put=sum(self._put.values()),
            refused=self._refused,
            consumed=self._numbers.consumed,
            redelivered=self._numbers.redelivered,
            backlog_max=max(samples.backlog),
            url=url,
            server=server,
            server_memory=on_server,
            client_memory=here,
            samples=len(samples.times),
            pressure=self._pressure,
            machine=machine,
            holds=tuple(holds),
            verified=not faults,
            faults=tuple(faults),
        )


def least_squares(times: list[float], values: list[float]) -> float:
    """The slope of the line nearest to the points; 0 for less than two."""
    if len(times) < 2:
        return 0.0
    middle, mean = sum(times) / len(times), sum(values) / len(values)
    spread = sum((moment - middle) ** 2 for moment in times)
    pairs = zip(times, values, strict=True)
    return sum((moment - middle) * (value - mean) for moment, value in pairs) / spread
