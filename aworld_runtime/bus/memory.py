"""The bus inside one process: `memory://`.

No loops, no timers, no tasks of its own: every call changes state in one synchronous step and wakes whoever waits for
that; a waiter then looks for itself. So cancelling a waiter can't strand anything, and nothing polls. A consumer that
waits for a queue with delayed work waits until the first of it is due.

    append ──▶ log ──wakes──▶ tail, mailbox's owner          put ──▶ ready ──wakes one──▶ take ──▶ held ──ack──▶ gone
       └─────▶ feed ─wakes──▶ feed readers                    │        ▲                            │
    send_mail ▶ mail ─wakes─▶ mailbox                         └▶ delayed (until due) ◀── retry, lost lease
    broadcast ▶ a bounded buffer per listener                              third failure ──▶ dead letters

Events are passed as the frozen objects they are; only one that looks large is encoded, to see whether it is too large.
One event loop may use a bus; several workers share it as task groups.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from itertools import count, islice
from typing import Any, Self, cast

import anyio
from anyio.lowlevel import checkpoint
from pydantic import BaseModel, JsonValue

from aworld_runtime.bus.base import (
    LEASE_S,
    MAX_DELIVERIES,
    DeadLetter,
    FeedEntry,
    Mail,
    NodeInfo,
)
from aworld_runtime.errors import BusUnavailableError, Fenced, NotFoundError, RequestTimeoutError
from aworld_runtime.events import EpisodeForked, Event, Registry, new_id
from aworld_runtime.names import episode_log

BATCH = 1000
"""Most feed entries or mails handed over at once."""
LISTENER_BUFFER = 1024
"""Broadcasts kept for a listener that is slow; then the oldest are dropped."""
WEIGH_ABOVE = 1024 * 1024
"""Estimated size above which an event is encoded to see whether it may pass. JSON is at most 6 times the estimate."""
YIELD_EVERY = 8
"""Calls after which one lets other tasks run, so that a busy loop of calls doesn't starve them."""


class MemoryBus:
    """Implements `Bus` for one process."""

    def __init__(self, url: str, registry: Registry) -> None:
        self.url = url
        self._registry = registry
        self._logs: dict[str, _Log] = {}
        self._feed = _Feed()
        self._queues: dict[str, _Queue] = {}
        self._channels: dict[str, set[_Listener]] = {}
        self._nodes: dict[str, tuple[NodeInfo, float]] = {}
        self._replies: dict[str, _Reply] = {}
        self._mail_ids = count(1)
        self._calls = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        pass

    # logs

    async def append(
        self, log: str, expected_seq: int, events: Sequence[Event], *, acks: Sequence[Mail] = ()
    ) -> int:
        for event in events:
            self._check_size(event)
        await self._let_others_run()
        entry = self._logs.get(log) or self._log(log)
        if expected_seq != entry.last and not entry.may_begin_at(expected_seq, events):
            if not entry.holds(expected_seq, events):
                raise Fenced(
                    f"append to log {log!r} after seq {expected_seq} refused: its last seq is {entry.last}, so another"
                    " owner appended; drop the work"
                )
        elif events:
            last = entry.add(expected_seq, events)
            self._feed.add(log, expected_seq + 1, last)
        for mail in acks:
            entry.mail.pop(int(mail.id), None)
        return expected_seq + len(events)

    async def read(self, log: str, start: int = 1, *, limit: int = 10_000) -> list[Event]:
        await self._let_others_run()
        entry = self._logs.get(log)
        return entry.read(start, limit) if entry else []

    async def last_seq(self, log: str) -> int:
        await self._let_others_run()
        entry = self._logs.get(log)
        return entry.last if entry else 0

    @asynccontextmanager
    async def tail(self, log: str, start: int = 1) -> AsyncGenerator[AsyncIterator[Event]]:
        with self._watched(log) as entry:
            yield _Tail(entry, start)

    async def restore(self, log: str, events: Sequence[Event]) -> None:
        entry = self._log(log)
        if events and not entry.last:
            entry.add(events[0].seq - 1, events)

    async def unlink(self, log: str) -> None:
        entry = self._logs.get(log)
        if entry is None:
            return
        entry.clear()
        if not entry.watchers:
            del self._logs[log]

    # feed

    @asynccontextmanager
    async def feed(self, after: str = "0") -> AsyncGenerator[AsyncIterator[list[FeedEntry]]]:
        yield _FeedReader(self._feed, self._feed.position(after))

    async def trim_feed(self, before: str) -> None:
        self._feed.trim(self._feed.position(before) - 1)

    # mail

    async def send_mail(self, log: str, event: Event) -> None:
        self._check_size(event)
        await self._let_others_run()
        self._mail(log, event)

    @asynccontextmanager
    async def mailbox(self, log: str) -> AsyncGenerator[AsyncIterator[list[Mail]]]:
        with self._watched(log) as entry:
            yield _Mailbox(entry)

    # queues

    async def put(self, queue: str, event: Event, *, at: datetime | None = None) -> None:
        self._check_size(event)
        await self._let_others_run()
        work = _Work(event)
        delay_s = 0.0 if at is None else (at - datetime.now(UTC)).total_seconds()
        if delay_s > 0:
            self._queue(queue).add_later(work, delay_s)
        else:
            self._queue(queue).add(work)

    @asynccontextmanager
    async def consume(
        self, queue: str, *, consumer: str, credit: int = 1, lease_s: float = LEASE_S
    ) -> AsyncGenerator[_Consumer]:
        place = _Consumer(self._queue(queue), consumer, credit, lease_s, self._let_others_run)
        try:
            yield place
        finally:
            place.close()

    async def backlog(self, queue: str) -> int:
        entry = self._queues.get(queue)
        return entry.unsettled if entry else 0

    async def dead_letters(self, queue: str) -> list[DeadLetter]:
        entry = self._queues.get(queue)
        return list(entry.dead.values()) if entry else []

    async def requeue(self, queue: str, dead_letter_id: str) -> None:
        entry = self._queue(queue)
        letter = entry.dead.pop(dead_letter_id, None)
        if letter is None or letter.event is None:
            raise NotFoundError(f"queue {queue!r} has no dead letter {dead_letter_id!r}")
        entry.add(_Work(letter.event))

    async def request(self, queue: str, event: Event, *, timeout_s: float) -> Event:
        reply = self._replies[event.id] = _Reply()
        try:
            with anyio.move_on_after(timeout_s):
                await self.put(queue, event)
                while reply.answer is None:
                    await reply.changed.wait()
        finally:
            del self._replies[event.id]
        if reply.answer is None:
            raise RequestTimeoutError(
                f"no reply to {event.type} {event.id} on queue {queue!r} within {timeout_s} s"
            )
        return reply.answer

    async def reply(self, request: Event, answer: Event) -> None:
        self._check_size(answer)
        await self._let_others_run()
        if request.episode_id is not None:
            self._mail(episode_log(request.episode_id), answer)
        elif (waiting := self._replies.get(request.id)) and waiting.answer is None:
            waiting.answer = answer
            waiting.changed.notify_all()

    # lanes

    async def broadcast(self, channel: str, value: JsonValue) -> None:
        await self._let_others_run()
        for listener in self._channels.get(channel, ()):
            listener.hear(value)

    @asynccontextmanager
    async def listen(self, channel: str) -> AsyncGenerator[AsyncIterator[JsonValue]]:
        listener = _Listener()
        self._channels.setdefault(channel, set()).add(listener)
        try:
            yield listener
        finally:
            self._channels[channel].remove(listener)
            if not self._channels[channel]:
                del self._channels[channel]

    # membership

    async def announce(self, node: NodeInfo, *, ttl_s: float = 5.0) -> None:
        self._nodes[node.name] = (node, time.monotonic() + ttl_s)

    async def withdraw(self, name: str) -> None:
        self._nodes.pop(name, None)

    async def nodes(self) -> list[NodeInfo]:
        now = time.monotonic()
        self._nodes = {name: entry for name, entry in self._nodes.items() if entry[1] > now}
        return [node for node, _ in self._nodes.values()]

    # inside

    def _log(self, name: str) -> _Log:
        return self._logs.setdefault(name, _Log())

    def _queue(self, name: str) -> _Queue:
        return self._queues.setdefault(name, _Queue(name))

    @contextmanager
    def _watched(self, name: str) -> Generator[_Log]:
        """The log, kept until the watcher is gone even where it is unlinked meanwhile."""
        entry = self._log(name)
        entry.watchers += 1
        try:
            yield entry
        finally:
            entry.watchers -= 1
            if not (entry.watchers or entry.last or entry.mail):
                self._logs.pop(name, None)

    def _mail(self, log: str, event: Event) -> None:
        number = next(self._mail_ids)
        entry = self._log(log)
        entry.mail[number] = Mail(str(number), log, event)
        entry.mailed.notify_all()

    def _check_size(self, event: Event) -> None:
        if _weight(event.data) > WEIGH_ABOVE:
            self._registry.encode(event)

    async def _let_others_run(self) -> None:
        """Comes before a change, never after: who is cancelled here has changed nothing."""
        self._calls += 1
        if self._calls % YIELD_EVERY == 0:
            await checkpoint()


class _Signal:
    """Wakes those who wait for a change; costs nothing while nobody does."""

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters: deque[anyio.Event] = deque()

    def notify_one(self) -> None:
        if self._waiters:
            self._waiters.popleft().set()

    def notify_all(self) -> None:
        while self._waiters:
            self._waiters.popleft().set()

    async def wait(self, timeout_s: float | None = None) -> None:
        """Return at the next change, or after `timeout_s`."""
        event = anyio.Event()
        self._waiters.append(event)
        try:
            if timeout_s is None:
                await event.wait()
            else:
                with anyio.move_on_after(timeout_s):
                    await event.wait()
        except BaseException:
            if (
                event.is_set()
            ):  # woken and cancelled at once: the change is for somebody else to see
                self.notify_one()
            raise
        finally:
            if not event.is_set():
                self._waiters.remove(event)


class _Log:
    """Events `base` + 1 … `last`, and the unacknowledged mail for their owner, oldest first."""

    __slots__ = ("appended", "base", "events", "mail", "mailed", "watchers")

    def __init__(self) -> None:
        self.base = 0
        self.events: list[Event] = []
        self.mail: dict[int, Mail] = {}
        self.appended = _Signal()
        self.mailed = _Signal()
        self.watchers = 0

    @property
    def last(self) -> int:
        return self.base + len(self.events)

    def may_begin_at(self, expected_seq: int, events: Sequence[Event]) -> bool:
        """Whether an empty log may begin in the middle: only a fork may."""
        if self.last or expected_seq <= 0 or not events:
            return False
        first = events[0].data
        return isinstance(first, EpisodeForked) and first.at == expected_seq

    def holds(self, expected_seq: int, events: Sequence[Event]) -> bool:
        """Whether these very events stand after `expected_seq`: the append was made and its reply lost."""
        index = expected_seq - self.base
        if index < 0 or not events:
            return False
        return [e.id for e in self.events[index : index + len(events)]] == [e.id for e in events]

    def add(self, after: int, events: Sequence[Event]) -> int:
        if not self.events:
            self.base = after
        self.events += [event.at(seq) for seq, event in enumerate(events, after + 1)]
        self.appended.notify_all()
        return self.last

    def read(self, start: int, limit: int) -> list[Event]:
        index = max(start - self.base - 1, 0)
        return self.events[index : index + limit]

    def clear(self) -> None:
        self.base = 0
        self.events = []
        self.mail = {}


class _Tail:
    """Iterates over a log; waits at its end."""

    def __init__(self, log: _Log, start: int) -> None:
        self._log = log
        self._next = start

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        log = self._log
        if self._next % YIELD_EVERY == 0:
            await checkpoint()
        while log.last < self._next:
            await log.appended.wait()
        event = log.read(self._next, 1)[0]
        self._next = event.seq + 1
        return event


class _Mailbox:
    """Iterates over a log's mail: what is there, then what comes; each mail once."""

    def __init__(self, log: _Log) -> None:
        self._log = log
        self._seen = 0

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Mail]:
        await checkpoint()
        while not (fresh := self._fresh()):
            await self._log.mailed.wait()
        self._seen = int(fresh[-1].id)
        return fresh

    def _fresh(self) -> list[Mail]:
        fresh: list[Mail] = []
        for number in reversed(self._log.mail):
            if number <= self._seen:
                break
            fresh.append(self._log.mail[number])
        fresh.reverse()
        return fresh


class _Feed:
    """Every append since the last trim.

    A cursor names this bus too: one saved by another process reads from the beginning here, instead of skipping what
    that process never saw.
    """

    def __init__(self) -> None:
        self._incarnation = new_id()
        self._entries: deque[tuple[str, int, int]] = deque()
        self._trimmed = 0
        self.added = _Signal()

    def add(self, log: str, first: int, last: int) -> None:
        self._entries.append((log, first, last))
        self.added.notify_all()

    def position(self, cursor: str) -> int:
        """How many entries there were up to the cursor's."""
        incarnation, _, position = cursor.partition("/")
        return int(position) if incarnation == self._incarnation else 0

    def after(self, position: int) -> tuple[list[FeedEntry], int]:
        """The entries after `position`, at most a batch, and the position of the last of them."""
        skip = max(position - self._trimmed, 0)
        first = self._trimmed + skip + 1
        found = [
            FeedEntry(f"{self._incarnation}/{number}", *entry)
            for number, entry in enumerate(islice(self._entries, skip, skip + BATCH), first)
        ]
        return found, first + len(found) - 1

    def trim(self, upto: int) -> None:
        while self._entries and self._trimmed < upto:
            self._entries.popleft()
            self._trimmed += 1


class _FeedReader:
    """Iterates over a feed in batches; waits at its end."""

    def __init__(self, feed: _Feed, position: int) -> None:
        self._feed = feed
        self._position = position

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[FeedEntry]:
        await checkpoint()
        while True:
            entries, self._position = self._feed.after(self._position)
            if entries:
                return entries
            await self._feed.added.wait()


class _Work:
    """An event in a queue, and how it has fared."""

    __slots__ = ("deliveries", "event", "failures", "holder")

    def __init__(self, event: Event) -> None:
        self.event = event
        self.deliveries = 0
        self.failures = 0
        self.holder: _Delivery | None = None


class _Queue:
    """Work for a role: `ready` now, `delayed` until due, held by consumers, or dead."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ready: deque[_Work] = deque()
        self.unsettled = 0
        self.dead: dict[str, DeadLetter] = {}
        self.changed = _Signal()
        self._delayed: list[tuple[float, int, _Work, _Delivery | None]] = []
        """Due, a tie breaker, the work, and whose lease on it ends then."""
        self._order = count()

    def add(self, work: _Work) -> None:
        self.unsettled += 1
        self._make_ready(work)

    def add_later(self, work: _Work, delay_s: float) -> None:
        self.unsettled += 1
        self.delay(work, delay_s)

    def delay(self, work: _Work, delay_s: float, lease: _Delivery | None = None) -> None:
        item = (time.monotonic() + delay_s, next(self._order), work, lease)
        heapq.heappush(self._delayed, item)
        if self._delayed[0] is item:
            self.changed.notify_all()  # those who wait must wait less long now

    def put_back(self, work: _Work) -> None:
        """Ready again, before all younger work."""
        work.holder = None
        self.ready.appendleft(work)
        self.changed.notify_one()

    def give_up(self, work: _Work, reason: str) -> None:
        self.unsettled -= 1
        letter = DeadLetter(new_id(), self.name, work.event, reason, work.deliveries)
        self.dead[letter.id] = letter

    def promote_due(self) -> float | None:
        """Make ready what is due; seconds until the next is."""
        while self._delayed:
            due, _, work, lease = self._delayed[0]
            wait_s = due - time.monotonic()
            if wait_s > 0:
                return wait_s
            heapq.heappop(self._delayed)
            if lease is None:
                self._make_ready(work)
            elif work.holder is lease:
                self.put_back(work)
        return None

    def _make_ready(self, work: _Work) -> None:
        self.ready.append(work)
        self.changed.notify_one()


class _Consumer:
    """Implements `Consumer`."""

    def __init__(
        self,
        queue: _Queue,
        name: str,
        credit: int,
        lease_s: float,
        let_others_run: Callable[[], Awaitable[None]],
    ) -> None:
        self.queue = queue
        self.held: dict[_Delivery, None] = {}
        self.freed = _Signal()
        self._name = name
        self._credit = credit
        self._lease_s = lease_s
        self._abandoned = False
        self._closed = False
        self._let_others_run = let_others_run

    async def take(self) -> _Delivery:
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
            elif queue.ready:
                return self._hold(queue.ready.popleft())
            else:
                await queue.changed.wait(wait_s)

    def abandon(self) -> None:
        self._abandoned = True
        for delivery in self.held:
            self.queue.delay(delivery.work, self._lease_s, delivery)

    def close(self) -> None:
        self._closed = True
        if not self._abandoned:
            for delivery in reversed(self.held):
                self.queue.put_back(delivery.work)
        self.held.clear()
        self.freed.notify_all()
        self.queue.changed.notify_all()

    def _hold(self, work: _Work) -> _Delivery:
        work.deliveries += 1
        work.holder = delivery = _Delivery(self, work)
        self.held[delivery] = None
        return delivery


class _Delivery:
    """Implements `Delivery`."""

    __slots__ = ("_consumer", "_settled", "count", "work")

    def __init__(self, consumer: _Consumer, work: _Work) -> None:
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

    async def ack(self) -> None:
        if self._settle():
            self._consumer.queue.unsettled -= 1

    async def retry(self, after_s: float, reason: str) -> None:
        if not self._settle():
            return
        self.work.failures += 1
        if self.work.failures >= MAX_DELIVERIES:
            self._consumer.queue.give_up(self.work, reason)
        else:
            self._consumer.queue.delay(self.work, after_s)

    async def dead_letter(self, reason: str) -> None:
        if self._settle():
            self._consumer.queue.give_up(self.work, reason)

    def _settle(self) -> bool:
        """Whether it was this delivery's to settle."""
        if self._settled or self.work.holder is not self:
            return False
        self._settled = True
        self.work.holder = None
        self._consumer.held.pop(self, None)
        self._consumer.freed.notify_one()
        return True


class _Listener:
    """Iterates over what is broadcast while it listens."""

    def __init__(self) -> None:
        self._heard: deque[JsonValue] = deque(maxlen=LISTENER_BUFFER)
        self._changed = _Signal()

    def hear(self, value: JsonValue) -> None:
        self._heard.append(value)
        self._changed.notify_all()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> JsonValue:
        await checkpoint()
        while not self._heard:
            await self._changed.wait()
        return self._heard.popleft()


class _Reply:
    """What a caller waits for."""

    def __init__(self) -> None:
        self.answer: Event | None = None
        self.changed = _Signal()


def _weight(value: Any) -> int:
    """About how many bytes a payload holds: never less than a sixth of its JSON."""
    weight = 0
    rest: list[Any] = [value]
    while rest:
        item = rest.pop()
        weight += 8
        if isinstance(item, str | bytes):
            weight += len(item)
        elif isinstance(item, int):
            weight += item.bit_length() >> 3
        elif isinstance(item, BaseModel):
            rest += item.__dict__.values()
            weight += 16 * len(item.__dict__)
        elif isinstance(item, Mapping):
            mapping = cast("Mapping[str, Any]", item)
            rest += mapping.values()
            weight += sum(map(len, mapping))
        elif isinstance(item, list | tuple):
            sequence = cast("Sequence[Any]", item)
            if sequence and isinstance(
                sequence[0], int | float
            ):  # token ids and logprobs: as a whole
                weight += 8 * len(sequence)
            else:
                rest += sequence
    return weight
