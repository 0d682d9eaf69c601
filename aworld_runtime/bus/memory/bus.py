"""The bus itself: names, what stands under them, and who is told of a change."""

from __future__ import annotations

import heapq
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from itertools import count, islice
from typing import Self
from urllib.parse import parse_qsl, urlsplit

import anyio
from anyio.lowlevel import checkpoint
from pydantic import JsonValue

from aworld_runtime import telemetry
from aworld_runtime.bus.base import (
    DEAD_MAIL,
    LEASE_S,
    RETIRED_S,
    DeadLetter,
    FeedEntry,
    Lane,
    Mail,
    NodeInfo,
    Subscription,
    due_within,
    lane_of,
    refusal,
)
from aworld_runtime.bus.limits import Limits, broadcast_body
from aworld_runtime.bus.memory.listener import Listener
from aworld_runtime.bus.memory.logs import Feed, FeedReader, Log, Mailbox, Tail
from aworld_runtime.bus.memory.queues import MemoryConsumer, Queue, Work
from aworld_runtime.bus.memory.signal import Signal
from aworld_runtime.bus.memory.weight import weight
from aworld_runtime.errors import ConfigError, Fenced, NotFoundError, RequestTimeoutError
from aworld_runtime.events import REFUSE_ABOVE, Event, Registry, new_id, utc_now
from aworld_runtime.names import episode_log

WEIGH_ABOVE = REFUSE_ABOVE // 8
"""Weight above which an event is encoded to see whether it may pass; its JSON is at most 6 times that, and what may
not be writable weighs more."""
LANES: tuple[Lane, ...] = ("control", "data")
"""Whose mail comes first."""
YIELD_EVERY = 8
"""Calls after which one lets other tasks run, so that a busy loop of calls doesn't starve them."""


class MemoryBus:
    """Implements `Bus` for one process. See `Limits` for what its URL may say."""

    def __init__(self, url: str, registry: Registry) -> None:
        self.url = url
        self._limits = limits_of(url)
        self._registry = registry
        self._logs: dict[str, Log] = {}
        self._feed = Feed()
        self._queues: dict[str, Queue] = {}
        self._channels: dict[str, set[Listener]] = {}
        self._nodes: dict[str, tuple[NodeInfo, float]] = {}
        self._replies: dict[str, Reply] = {}
        self._mail_ids = count(1)
        self._calls = 0
        self._retired: list[tuple[float, str]] = []
        """A heap of when the last events of retired logs go."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        pass

    def now(self) -> datetime:
        return utc_now()

    # logs

    async def append(
        self,
        log: str,
        expected_seq: int,
        events: Sequence[Event],
        *,
        acks: Sequence[Mail] = (),
        feed_id: str | None = None,  # noqa: ARG002 - its data and this process are lost together
    ) -> int:
        for event in events:
            self._check(event)
        await self._let_others_run()
        self._forget_retired()
        entry = self._log(log)
        if not entry.takes(expected_seq, events):
            if not entry.holds(expected_seq, events):
                telemetry.FENCED.add()
                raise Fenced(refusal(log, expected_seq, entry.last))
        elif events:
            last = entry.add(expected_seq, events)
            self._feed.add(log, expected_seq + 1, last)
            telemetry.APPENDED.add(len(events))
        for mail in acks:
            entry.acknowledge(mail)
        return expected_seq + len(events)

    async def read(self, log: str, start: int = 1, *, limit: int = 10_000) -> list[Event]:
        await self._let_others_run()
        self._forget_retired()
        entry = self._logs.get(log)
        return entry.read(start, limit) if entry else []

    async def last_seq(self, log: str) -> int:
        await self._let_others_run()
        self._forget_retired()
        entry = self._logs.get(log)
        return entry.last if entry else 0

    @asynccontextmanager
    async def tail(self, log: str, start: int = 1) -> AsyncGenerator[AsyncIterator[Event]]:
        self._forget_retired()
        entry = self._watch(log)
        try:
            yield Tail(entry, start)
        finally:
            self._unwatch(log, entry)

    async def restore(self, log: str, events: Sequence[Event]) -> None:
        if not events:
            return
        self._forget_retired()
        entry = self._log(log)
        if entry.retired_until is not None and [e.id for e in entry.events] == [events[-1].id]:
            entry.forget_events()
        if not entry.last:
            after = events[0].seq - 1
            self._feed.add(log, after + 1, entry.add(after, events))

    async def unlink(self, log: str, *, keep_s: float = RETIRED_S, last: int | None = None) -> None:
        self._forget_retired()
        entry = self._logs.get(log)
        if entry is None or last not in (None, entry.last):
            return
        entry.forget_mail()
        if entry.last and keep_s > 0:
            until = anyio.current_time() + keep_s
            entry.retire(until)
            heapq.heappush(self._retired, (until, log))
        else:
            self._forget_events(log, entry)

    async def server_id(self) -> str:
        return self._feed.id

    # feed

    async def feed_id(self, log: str | None = None) -> str:  # noqa: ARG002 - there is one feed
        return self._feed.id

    @asynccontextmanager
    async def feed(self, after: str = "0") -> AsyncGenerator[AsyncIterator[list[FeedEntry]]]:
        yield FeedReader(self._feed, self._feed.position(after))

    async def trim_feed(self, *before: str) -> None:
        if before:
            self._feed.trim(self._feed.first(before) - 1)

    def subscribe(self, *types: str, after: str = "0") -> Subscription:
        return Subscription(self, types, after)

    # mail

    async def send_mail(self, log: str, *events: Event) -> None:
        for event in events:
            self._check(event)
        await self._let_others_run()
        self._mail(log, *map(on_its_way, events))
        telemetry.MAILED.add(len(events))

    async def bury_mail(self, mail: Mail, reason: str) -> None:
        await self._let_others_run()
        letter = DeadLetter(new_id(), DEAD_MAIL, mail.event, reason, 1, utc_now(), log=mail.log)
        self._queue(DEAD_MAIL).dead[letter.id] = letter
        self._log(mail.log).acknowledge(mail)
        telemetry.DEAD.add()

    def mailbox(self, log: str, lane: Lane | None = None) -> Mailbox:
        entry = self._watch(log)
        return Mailbox(entry, (lane,) if lane else LANES, partial(self._unwatch, log, entry))

    # queues

    async def put(self, queue: str, *events: Event, at: datetime | None = None) -> None:
        for event in events:
            self._check(event)
        await self._let_others_run()
        delay_s = 0.0 if at is None else (at - datetime.now(UTC)).total_seconds()
        place = self._queue(queue)
        self._limits.check_queue(queue, place.unsettled)
        for event in events:
            work = Work(on_its_way(event))
            if delay_s > 0:
                place.add_later(work, delay_s)
            else:
                place.add(work)
        telemetry.PUT.add(len(events))

    @asynccontextmanager
    async def consume(
        self,
        queue: str,
        *,
        consumer: str,
        credit: int = 1,
        lease_s: float = LEASE_S,
        past_deadline: bool = False,
    ) -> AsyncGenerator[MemoryConsumer]:
        place = MemoryConsumer(
            self._queue(queue),
            consumer,
            credit,
            lease_s,
            self._let_others_run,
            past_deadline=past_deadline,
        )
        try:
            yield place
        finally:
            place.close()

    async def backlog(self, queue: str) -> int:
        entry = self._queues.get(queue)
        return entry.unsettled if entry else 0

    async def dead_letter_queues(self) -> list[str]:
        return sorted(name for name, entry in self._queues.items() if entry.dead)

    async def dead_letters(self, queue: str, *, limit: int = 10_000) -> list[DeadLetter]:
        entry = self._queues.get(queue)
        return list(islice(entry.dead.values(), limit)) if entry else []

    async def requeue(self, queue: str, dead_letter_id: str) -> None:
        letter = self._find_dead(queue, dead_letter_id)
        if letter.event is not None and letter.log is not None:
            self._mail(letter.log, letter.event)
        elif letter.event is not None:
            self._queue(queue).add(Work(letter.event))
        del self._queues[queue].dead[dead_letter_id]

    async def drop(self, queue: str, dead_letter_id: str) -> None:
        self._find_dead(queue, dead_letter_id)
        del self._queues[queue].dead[dead_letter_id]

    def _find_dead(self, queue: str, dead_letter_id: str) -> DeadLetter:
        entry = self._queues.get(queue)
        letter = entry.dead.get(dead_letter_id) if entry else None
        if letter is None:
            raise NotFoundError(f"queue {queue!r} has no dead letter {dead_letter_id!r}")
        return letter

    async def request(self, queue: str, event: Event, *, timeout_s: float) -> Event:
        reply = self._replies[event.id] = Reply()
        try:
            with anyio.move_on_after(timeout_s):
                await self.put(queue, due_within(event, timeout_s, self.now()))
                while reply.answer is None:
                    await reply.changed.wait()
        finally:
            self._replies.pop(event.id, None)
        if reply.answer is None:
            raise RequestTimeoutError(
                f"no reply to {event.type} {event.id} on queue {queue!r} within {timeout_s} s"
            )
        return reply.answer

    async def reply(self, request: Event, answer: Event) -> None:
        self._check(answer)
        await self._let_others_run()
        if request.episode_id is not None:
            self._mail(episode_log(request.episode_id), on_its_way(answer))
            telemetry.MAILED.add()
        elif (waiting := self._replies.get(request.id)) and waiting.answer is None:
            waiting.answer = on_its_way(answer)
            waiting.changed.notify_all()

    # broadcasts

    async def broadcast(self, channel: str, value: JsonValue) -> None:
        size = len(broadcast_body(channel, value))
        await self._let_others_run()
        for listener in self._channels.get(channel, ()):
            listener.hear(value, size)

    @asynccontextmanager
    async def listen(self, channel: str) -> AsyncGenerator[AsyncIterator[JsonValue]]:
        listener = Listener()
        self._channels.setdefault(channel, set()).add(listener)
        try:
            yield listener
        finally:
            self._channels[channel].remove(listener)
            if not self._channels[channel]:
                del self._channels[channel]

    # membership

    async def announce(self, node: NodeInfo, *, ttl_s: float = 5.0) -> None:
        node = node.model_copy(update={"seen": self.now()})
        self._nodes[node.name] = (node, anyio.current_time() + ttl_s)

    async def withdraw(self, name: str) -> None:
        self._nodes.pop(name, None)

    async def nodes(self) -> list[NodeInfo]:
        now = anyio.current_time()
        self._nodes = {name: entry for name, entry in self._nodes.items() if entry[1] > now}
        return [node for node, _ in self._nodes.values()]

    # inside

    def _log(self, name: str) -> Log:
        entry = self._logs.get(name)
        if entry is None:
            entry = self._logs[name] = Log()
        return entry

    def _forget_retired(self) -> None:
        while self._retired and self._retired[0][0] <= anyio.current_time():
            due, name = heapq.heappop(self._retired)
            entry = self._logs.get(name)
            if entry is not None and entry.retired_until == due:
                self._forget_events(name, entry)

    def _forget_events(self, name: str, entry: Log) -> None:
        entry.forget_events()
        if entry.idle:
            del self._logs[name]

    def _queue(self, name: str) -> Queue:
        entry = self._queues.get(name)
        if entry is None:
            entry = self._queues[name] = Queue(name)
        return entry

    def _watch(self, name: str) -> Log:
        """The log, kept until the watcher is gone even where it is unlinked meanwhile."""
        entry = self._log(name)
        entry.watchers += 1
        return entry

    def _unwatch(self, name: str, entry: Log) -> None:
        entry.watchers -= 1
        if entry.idle:
            self._logs.pop(name, None)

    def _mail(self, log: str, *events: Event) -> None:
        entry = self._log(log)
        lanes: set[Lane] = {lane_of(event) for event in events}
        for lane in lanes:
            self._limits.check_mail(log, len(entry.mail[lane]))
        for event in events:
            number = next(self._mail_ids)
            entry.add_mail(number, Mail(str(number), log, event))

    def _check(self, event: Event) -> None:
        if weight(event.data) > WEIGH_ABOVE:
            self._registry.encode(event)

    async def _let_others_run(self) -> None:
        """Comes before a change, never after: who is cancelled here has changed nothing."""
        self._calls += 1
        if self._calls % YIELD_EVERY == 0:
            await checkpoint()


def limits_of(url: str) -> Limits:
    """Raises `ConfigError` where the URL says anything else."""
    query = dict(parse_qsl(urlsplit(url).query))
    try:
        limits = Limits.taken_from(query)
    except ValueError as error:
        raise ConfigError(f"bus {url}: {error}") from error
    if query:
        raise ConfigError(
            f"bus {url}: unknown parameter {next(iter(query))!r}; allowed are queue_limit and mail_limit"
        )
    return limits


def on_its_way(event: Event) -> Event:
    """The event outside of a log, where it has no place: as on a bus that sends bytes."""
    return event.at(0) if event.seq else event


class Reply:
    """What a caller waits for."""

    def __init__(self) -> None:
        self.answer: Event | None = None
        self.changed = Signal()
