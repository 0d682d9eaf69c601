"""The throughput phase: each event appended to its log, delivered to its role, acknowledged, and verified.

    publishers: an owner each, turn by turn          consumers: one for each role
    append(log, seq, turn) ─▶ put(queue, *turn) ──▶ take_many ─▶ ack(deliveries) ─▶ counted

Both sides share this process and one client, as in a small deployment; the server's time counts too. Events are built
before a round's clock starts, and checked after it has stopped; what that costs is said, but not counted.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial

import anyio

from aworld_runtime.bench.cost import CpuSeconds, Meter
from aworld_runtime.bench.load import Load, Round, Script, Writer, queue_name, role_name, rounds
from aworld_runtime.bench.progress import Progress
from aworld_runtime.bench.verify import check_deliveries, check_log
from aworld_runtime.bus.base import Bus, read_all
from aworld_runtime.bus.room import when_there_is_room
from aworld_runtime.messages import Data

STALLED_S = 30.0
"""Seconds without any acknowledged event after which a round is given up."""
FAULTS = 20
"""Faults that are kept; the first ones say most."""


class Throughput(Data):
    """Figures of the phase."""

    events: int
    """Acknowledged, each counted once."""
    wall_s: float
    cpu: CpuSeconds
    building_cpu_s: float
    """What making the events cost their publishers before the clock ran; not in `cpu`."""
    redelivered: int
    """Events that came more than once, which a queue may do; 0 where nothing goes wrong."""
    faults: tuple[str, ...]

    @property
    def per_second(self) -> float:
        return self.events / self.wall_s if self.wall_s else 0.0

    @property
    def per_core_second(self) -> float:
        return self.events / self.cpu.total if self.cpu.total else 0.0


@dataclass
class Receipts:
    """What the consumers of a round have acknowledged."""

    wanted: int
    acked: dict[str, set[str]]
    redelivered: int = 0
    count: int = 0
    complete: anyio.Event = field(default_factory=anyio.Event)

    def add(self, role: str, ids: list[str]) -> None:
        acked = self.acked[role]
        before = len(acked)
        acked.update(ids)
        fresh = len(acked) - before
        self.redelivered += len(ids) - fresh
        self.count += fresh
        if self.count >= self.wanted:
            self.complete.set()


class ThroughputPhase:
    """Runs a load on an open bus."""

    def __init__(self, bus: Bus, load: Load, meter: Meter, progress: Progress) -> None:
        self._bus = bus
        self._load = load
        self._meter = meter
        self._progress = progress
        self._feed_cursor = "0"

    async def run(self) -> Throughput:
        building_s = 0.0
        events = redelivered = 0
        faults: list[str] = []
        writer = Writer()
        pending = rounds(self._load, writer)
        while True:
            began = time.process_time()
            this = next(pending, None)
            building_s += time.process_time() - began
            if this is None:
                break
            receipts = await self._timed(this)
            events += receipts.count
            redelivered += receipts.redelivered
            faults += await self._verify(this, receipts)
            self._progress.tick(f"throughput: {events:,} of {self._load.events:,} events")
            if receipts.count < this.events:
                faults.insert(0, f"nothing was acknowledged for {STALLED_S:.0f} s: given up")
                break
        return Throughput(
            events=events,
            wall_s=self._meter.wall_s,
            cpu=self._meter.cpu,
            building_cpu_s=building_s,
            redelivered=redelivered,
            faults=tuple(faults[:FAULTS]),
        )

    async def _timed(self, this: Round) -> Receipts:
        receipts = Receipts(this.events, {role: set[str]() for role in this.sent})
        owners = deque(this.scripts)
        async with anyio.create_task_group() as tasks:
            ready = [anyio.Event() for _ in this.sent]
            for role, joined in zip(this.sent, ready, strict=True):
                tasks.start_soon(self._consume, role, receipts, joined)
            for joined in ready:
                await joined.wait()
            async with self._meter.running():
                for _ in range(self._load.publishers):
                    tasks.start_soon(self._publish, owners)
                await _until_complete(receipts)
            tasks.cancel_scope.cancel()
        return receipts

    async def _publish(self, owners: deque[Script]) -> None:
        """Take the owner that has waited longest, let it do one turn, and put it back."""
        while owners:
            owner = owners.popleft()
            turn = owner.turns.popleft()
            append = partial(self._bus.append, owner.log, owner.seq, turn.events)
            owner.seq = await when_there_is_room(append, who=owner.log)
            put = partial(self._bus.put, queue_name(turn.role), *turn.events)
            await when_there_is_room(put, who=owner.log)
            if owner.turns:
                owners.append(owner)

    async def _consume(self, role: str, receipts: Receipts, joined: anyio.Event) -> None:
        queue, load = queue_name(role), self._load
        async with self._bus.consume(queue, consumer="bench", credit=load.credit) as consumer:
            joined.set()
            while True:
                deliveries = await consumer.take_many(load.take)
                ids = [delivery.event.id for delivery in deliveries]
                await consumer.ack(deliveries)
                receipts.add(role, ids)

    async def _verify(self, this: Round, receipts: Receipts) -> list[str]:
        """Look at the logs, the queues and the feed; then free what the round has left."""
        faults: list[str] = []
        for script in this.scripts:
            faults += check_log(script.log, script.ids, await read_all(self._bus, script.log))
        for role, sent in this.sent.items():
            faults += check_deliveries(role, sent, receipts.acked[role])
        for role in map(role_name, range(self._load.roles)):
            if left := await self._bus.backlog(queue_name(role)):
                faults.append(f"{role}: its queue still holds {left} events")
            if dead := await self._bus.dead_letters(queue_name(role)):
                faults.append(f"{role}: {len(dead)} dead letters, such as: {dead[0].reason}")
        faults += await self._check_feed({script.log: script.seq for script in this.scripts})
        for script in this.scripts:
            await self._bus.unlink(script.log, keep_s=0)
        await self._bus.trim_feed(self._feed_cursor)
        return faults

    async def _check_feed(self, last_seqs: dict[str, int]) -> list[str]:
        """The feed told of every append, each log's in order."""
        told = dict.fromkeys(last_seqs, 0)
        behind = {log for log, last in last_seqs.items() if last}
        with anyio.move_on_after(STALLED_S):
            async with self._bus.feed(self._feed_cursor) as feed:
                while behind:
                    for entry in await anext(feed):
                        self._feed_cursor = entry.cursor
                        if entry.log in told and entry.first == told[entry.log] + 1:
                            told[entry.log] = entry.last
                            if entry.last == last_seqs[entry.log]:
                                behind.discard(entry.log)
        return [
            f"feed: it told of {told[log]} of {last_seqs[log]} events of {log}" for log in behind
        ]


async def _until_complete(receipts: Receipts) -> None:
    """Wait for the last event; no longer than `STALLED_S` since one came."""
    count = -1
    while not receipts.complete.is_set() and receipts.count > count:
        count = receipts.count
        with anyio.move_on_after(STALLED_S):
            await receipts.complete.wait()
