"""Queues of work, their consumers, and what these hold."""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import count

import anyio

from aworld_runtime import telemetry
from aworld_runtime.bus.backoff import backoff_s
from aworld_runtime.bus.base import MAX_DELIVERIES, DeadLetter, Delivery, Standing, too_late
from aworld_runtime.bus.memory.signal import Signal
from aworld_runtime.errors import BusUnavailableError
from aworld_runtime.events import Event, new_id, utc_now


class Work:
    """An event in a queue, and how it has fared."""

    __slots__ = ("deliveries", "event", "failures", "holder", "place", "settled")

    def __init__(self, event: Event) -> None:
        self.event = event
        self.deliveries = 0
        self.failures = 0
        self.place = 0
        """Younger work has a higher one."""
        self.holder: MemoryDelivery | None = None
        self.settled = False
        """Done or dead: in no queue any more."""


class Queue:
    """Work for a role: `ready` now, `delayed` until due, held by consumers, or dead."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ready: deque[Work] = deque()
        self.unsettled = 0
        self.dead: dict[str, DeadLetter] = {}
        self.changed = Signal()
        self._delayed: list[tuple[float, int, Work, MemoryDelivery | None]] = []
        """Due, its number, the work, and whose lease on it ends then."""
        self._order = count()

    def add(self, work: Work) -> None:
        self.unsettled += 1
        self._make_ready(work)

    def add_later(self, work: Work, delay_s: float) -> None:
        self.unsettled += 1
        self.delay(work, delay_s)

    def delay(self, work: Work, delay_s: float, lease: MemoryDelivery | None = None) -> None:
        item = (anyio.current_time() + delay_s, next(self._order), work, lease)
        heapq.heappush(self._delayed, item)
        if self._delayed[0] is item:
            self.changed.notify_all()  # those who wait must wait less long now

    def next(self, *, past_deadline: bool) -> Work | None:
        """The oldest work that is ready; what is too late is given up on, unless it is wanted."""
        while self.ready:
            work = self.ready.popleft()
            reason = None if past_deadline else too_late(work.event, utc_now)
            if reason is None:
                return work
            self.give_up(work, reason)
        return None

    def put_back(self, work: Work) -> None:
        """Ready again where it stood, before all younger work."""
        work.holder = None
        insort(self.ready, work, key=lambda other: other.place)
        self.changed.notify_one()

    def give_up(self, work: Work, reason: str) -> None:
        self.unsettled -= 1
        letter = DeadLetter(new_id(), self.name, work.event, reason, work.deliveries, utc_now())
        self.dead[letter.id] = letter
        telemetry.DEAD.add()

    def promote_due(self) -> float | None:
        """Make ready what is due; seconds until the next is."""
        while self._delayed:
            due, _, work, lease = self._delayed[0]
            wait_s = due - anyio.current_time()
            if wait_s > 0:
                return wait_s
            heapq.heappop(self._delayed)
            if lease is None:
                self._make_ready(work)
            elif work.holder is lease:
                telemetry.LOST_LEASES.add()
                self.put_back(work)
        return None

    def _make_ready(self, work: Work) -> None:
        work.place = next(self._order)
        self.ready.append(work)
        self.changed.notify_one()


class MemoryConsumer:
    """Implements `Consumer`."""

    def __init__(
        self,
        queue: Queue,
        name: str,
        credit: int,
        lease_s: float,
        let_others_run: Callable[[], Awaitable[None]],
        *,
        past_deadline: bool = False,
    ) -> None:
        self.queue = queue
        self.held: dict[MemoryDelivery, None] = {}
        self.freed = Signal()
        self._name = name
        self._credit = credit
        self._lease_s = lease_s
        self._past_deadline = past_deadline
        self._abandoned = False
        self._closed = False
        self._let_others_run = let_others_run
        telemetry.HELD.watch(self, MemoryConsumer.unsettled, queue.name)

    async def take(self) -> MemoryDelivery:
        await self._let_others_run()
        queue = self.queue
        while True:
            if self._abandoned:  # as when the process is dead: nothing happens any more
                await anyio.sleep_forever()
            if self._closed:
                raise BusUnavailableError(
                    f"consumer {self._name!r} of queue {queue.name!r} is closed"
                )
            wait_s = queue.promote_due()
            if len(self.held) >= self._credit:
                if queue.ready:
                    queue.changed.notify_one()  # if it was this one that was woken, another may take it
                await self.freed.wait()
            elif work := queue.next(past_deadline=self._past_deadline):
                telemetry.DELIVERED.add()
                return self._hold(work)
            else:
                await queue.changed.wait(wait_s)

    async def take_many(self, at_most: int) -> list[MemoryDelivery]:
        taken = [await self.take()]
        while len(taken) < at_most and len(self.held) < self._credit:
            work = self.queue.next(past_deadline=self._past_deadline)
            if work is None:
                break
            taken.append(self._hold(work))
        telemetry.DELIVERED.add(len(taken) - 1)
        return taken

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        settled = [d for d in deliveries if isinstance(d, MemoryDelivery) and d.settle()]
        for delivery in settled:
            delivery.work.settled = True
        self.queue.unsettled -= len(settled)
        telemetry.ACKED.add(len(settled))

    def unsettled(self) -> int:
        return len(self.held)

    def abandon(self) -> None:
        self._abandoned = True
        for delivery in self.held:
            self.queue.delay(delivery.work, self._lease_s, delivery)
        self.queue.changed.notify_all()  # its own takes must not be woken for work any more

    def close(self) -> None:
        self._closed = True
        if not self._abandoned:
            for delivery in self.held:
                self.queue.put_back(delivery.work)
        self.held.clear()
        self.freed.notify_all()
        self.queue.changed.notify_all()

    def _hold(self, work: Work) -> MemoryDelivery:
        work.deliveries += 1
        work.holder = delivery = MemoryDelivery(self, work)
        self.held[delivery] = None
        return delivery


class MemoryDelivery:
    """Implements `Delivery`."""

    __slots__ = ("_consumer", "_settled", "count", "work")

    def __init__(self, consumer: MemoryConsumer, work: Work) -> None:
        self.work = work
        self.count = work.deliveries
        self._consumer = consumer
        self._settled = False

    @property
    def event(self) -> Event:
        return self.work.event

    @property
    def queue(self) -> str:
        return self._consumer.queue.name

    @property
    def lost(self) -> bool:
        return not self._settled and self.work.holder is not self

    async def standing(self) -> Standing:
        if self.work.settled:
            return "gone"
        return "held" if self.work.holder is self else "taken"

    async def ack(self) -> None:
        await self._consumer.ack((self,))

    async def retry(self, after_s: float | None, reason: str) -> bool:
        if not self.settle():
            return True
        self.work.failures += 1
        if self.work.failures >= MAX_DELIVERIES:
            self.work.settled = True
            self._consumer.queue.give_up(self.work, reason)
            return False
        delay_s = backoff_s(self.work.failures) if after_s is None else after_s
        self._consumer.queue.delay(self.work, delay_s)
        telemetry.RETRIED.add()
        return True

    async def dead_letter(self, reason: str) -> None:
        if self.settle():
            self.work.settled = True
            self._consumer.queue.give_up(self.work, reason)

    def settle(self) -> bool:
        """Whether it was this delivery's to settle."""
        if self._settled or self.work.holder is not self:
            return False
        self._settled = True
        self.work.holder = None
        self._consumer.held.pop(self, None)
        self._consumer.freed.notify_one()
        return True
