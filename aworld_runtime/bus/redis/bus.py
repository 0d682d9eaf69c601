"""`RedisBus`: the bus contract over the pieces of this package, and the loops that it owns."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from secrets import token_hex
from typing import Self

import anyio
from anyio.abc import TaskGroup
from pydantic import JsonValue

from aworld_runtime import telemetry
from aworld_runtime.bus.base import (
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
from aworld_runtime.bus.limits import broadcast_body
from aworld_runtime.bus.redis import codec
from aworld_runtime.bus.redis.clock import Clock
from aworld_runtime.bus.redis.cluster import SHARDS, ClusterLink
from aworld_runtime.bus.redis.codec import Codec
from aworld_runtime.bus.redis.consumer import RedisConsumer, Services
from aworld_runtime.bus.redis.dead import DeadLetters
from aworld_runtime.bus.redis.entries import (
    BODY,
    Entry,
    Kept,
    entries,
    position,
    seq_of,
    unpacked,
)
from aworld_runtime.bus.redis.feed import FeedReader
from aworld_runtime.bus.redis.follow import SWEEP_S, Follows
from aworld_runtime.bus.redis.hearers import Listener, Waiting
from aworld_runtime.bus.redis.heartbeat import Heartbeat
from aworld_runtime.bus.redis.hints import Hints
from aworld_runtime.bus.redis.keys import Keys
from aworld_runtime.bus.redis.link import SILENT_S, Link, ServerLink
from aworld_runtime.bus.redis.readers import Mailbox, Tail
from aworld_runtime.bus.redis.scripts import SCRIPTS, logs, nodes, queues
from aworld_runtime.bus.redis.shards import ShardedFeedReader, read_cursor
from aworld_runtime.bus.redis.timers import Timers
from aworld_runtime.bus.redis.tls import mismatch
from aworld_runtime.bus.redis.wire import Address, Unreachable, denial
from aworld_runtime.errors import (
    BusFullError,
    BusUnavailableError,
    ConfigError,
    Fenced,
    NoBusError,
    RequestTimeoutError,
)
from aworld_runtime.events import EpisodeForked, Event, Registry, new_id
from aworld_runtime.names import episode_log
from aworld_runtime.payloads import NONE, Blob, references
from aworld_runtime.signatures import Signer

logger = logging.getLogger(__name__)

READ_BATCH = 64
"""Entries of a log in one reply: a long one must not keep the others' calls waiting."""
RESTORE_BATCH = 256
"""Events of a log put back at once."""


class RedisBus:
    """Implements `Bus`.

    `?namespace=` keeps several apart on one server; `?outage_s=` is how long a call waits for a
    server that is away, `?outbox_mb=` how much may wait to be sent; see `Limits` for the others.
    """

    def __init__(self, url: str, registry: Registry, signer: Signer | None = None) -> None:
        self._address = Address.parse(url)
        self.url = self._address.url
        clustered = bool(self._address.seeds)
        self._keys = Keys(self._address.namespace, SHARDS if clustered else 1)
        make_link = ClusterLink if clustered else ServerLink
        self._link: Link = make_link(self._address, SCRIPTS)
        self._hints = Hints(self._link.dial, self._reconnected, partial(denial, self._address))
        self._follows = Follows(self._link, self._hints)
        self._timers = Timers(self._link)
        self._clock = Clock()
        self._codec = Codec(registry, self._keys.namespace, signer)
        self._dead = DeadLetters(self._link, self._keys, self._codec)
        self._heartbeat = Heartbeat(self._link)
        self._services = Services(
            self._link,
            self._timers,
            self._heartbeat,
            self._codec,
            self._clock,
            self._keys.dead_queues,
            self._address.outage_s,
        )
        self._consumers: set[RedisConsumer] = set()
        self._token = token_hex(4)
        """Tells this bus's nodes from those of another process that have the same names."""
        self._tasks: TaskGroup | None = None
        self._loops = anyio.CancelScope(shield=True)

    async def __aenter__(self) -> Self:
        await self._connect()
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._run_loops)
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._tasks is None:
            return
        for consumer in self._consumers:
            consumer.stop()
        self._loops.cancel()
        # Only a cancellation is the task group's business; an error of the caller's passes as it is.
        error = next((e for e in exc if isinstance(e, anyio.get_cancelled_exc_class())), None)
        try:
            await self._tasks.__aexit__(error and type(error), error, None)
        finally:
            with anyio.CancelScope(shield=True):
                await self._link.close()
                await anyio.to_thread.run_sync(self._heartbeat.stop)

    def now(self) -> datetime:
        return self._clock.now()

    @property
    def waiting_bytes(self) -> int:
        """What has been called and not answered yet."""
        return self._link.waiting_bytes()

    # logs

    async def append(
        self,
        log: str,
        expected_seq: int,
        events: Sequence[Event],
        *,
        acks: Sequence[Mail] = (),
        feed_id: str | None = None,
    ) -> int:
        began = time.perf_counter()
        keys, blobs = self._keys.log(log), list[Blob]()
        write = self._codec.encode_in_log
        bodies = [
            write(event, log, seq, blobs) for seq, event in enumerate(events, expected_seq + 1)
        ]
        if blobs:
            await logs.keep_blobs(self._link, keys, blobs)
        place = logs.Place(log, expected_seq, _forks_at(expected_seq, events), feed_id)
        last = await logs.append(self._link, keys, place, bodies, acks)
        telemetry.APPEND_SECONDS.observe(time.perf_counter() - began)
        if last < 0 and not await self._stands(log, expected_seq, events):
            telemetry.FENCED.add()
            raise Fenced(refusal(log, expected_seq, -1 - last))
        telemetry.APPENDED.add(len(events))
        return expected_seq + len(events)

    async def read(self, log: str, start: int = 1, *, limit: int = 10_000) -> list[Event]:
        keys = self._keys.log(log)
        events: list[Event] = []
        position = max(start, 1)
        while len(events) < limit:
            count = min(limit - len(events), READ_BATCH)
            reply = await self._link.call(
                b"XRANGE", keys.log, f"{position}-0", b"+", b"COUNT", str(count)
            )
            kept = [k for e in entries(reply) for k in unpacked(log, e) if k.seq >= position]
            events += await self._events(log, kept[: limit - len(events)])
            if len(reply) < count:
                if events and not reply and await self.last_seq(log) < position - 1:
                    # The server lost the log between two pages: the first ones alone would pass for all of it.
                    return await self.read(log, start, limit=limit)
                break
            position = events[-1].seq + 1
        return events

    async def last_seq(self, log: str) -> int:
        key = self._keys.log(log).log
        reply = await self._link.call(b"XREVRANGE", key, b"+", b"-", b"COUNT", b"1")
        return seq_of(reply[0][0]) if reply else 0

    @asynccontextmanager
    async def tail(self, log: str, start: int = 1) -> AsyncGenerator[AsyncIterator[Event]]:
        start = max(start, 1)
        after = f"{start - 1}-0".encode()
        with self._follows.following(self._keys.log(log).log, after=after) as follower:
            yield Tail(follower, log, start, self._events)

    async def restore(self, log: str, events: Sequence[Event]) -> None:
        if not events:
            return
        first = events[0].seq or 1
        if last := await self.last_seq(log):
            ours = events[-1] if last - first == len(events) - 1 else None
            there = await self.read(log, limit=1)
            if ours is None or not there or (there[0].seq, there[0].id) != (last, ours.id):
                return
        staging, keys = self._keys.staging(log, new_id()), self._keys.log(log)
        for begin in range(0, len(events), RESTORE_BATCH):
            batch = events[begin : begin + RESTORE_BATCH]
            blobs: list[Blob] = []
            bodies = [
                self._codec.encode_in_log(event, log, seq, blobs)
                for seq, event in enumerate(batch, first + begin)
            ]
            await logs.keep_blobs(self._link, keys, blobs)
            await logs.stage(self._link, staging, first + begin, bodies)
        end = first + len(events) - 1
        await logs.unstage(self._link, staging, keys, log, first, end)

    async def unlink(self, log: str, *, keep_s: float = RETIRED_S, last: int | None = None) -> None:
        await logs.retire(self._link, self._keys.log(log), round(keep_s * 1000), last)

    async def server_id(self) -> str:
        run_ids: list[str] = []
        for facts in self._link.ask_all(b"INFO", b"server"):
            try:
                found = re.search(rb"run_id:(\w+)", await facts)
            except BusUnavailableError:
                if self._keys.shards == 1:
                    raise
                found = None
            run_ids.append(found[1].decode() if found else "away")
        feed_id = await self._link.call(b"GET", self._keys.feed_id)
        return f"{'+'.join(run_ids)}/{(feed_id or b'').decode()}"

    # feed

    async def feed_id(self, log: str | None = None) -> str:
        key = self._keys.feed_id if log is None else self._keys.log(log).feed_id
        found = await self._link.call(b"GET", key)
        if found is None:  # asked first, as a full server refuses a SET even where it sets nothing
            fresh = new_id().encode()
            found = await self._link.call(b"SET", key, fresh, b"NX", b"GET") or fresh
        return found.decode()

    @asynccontextmanager
    async def feed(self, after: str = "0") -> AsyncGenerator[AsyncIterator[list[FeedEntry]]]:
        if self._keys.shards > 1:
            sharded = ShardedFeedReader(self._link, self._keys, after)
            with self._hints.watching(self._keys.logs, sharded.hear):
                yield sharded
            return
        reader = FeedReader(self._link, self._keys.feeds[0], after, self._address.outage_s)
        try:
            yield reader
        finally:
            await reader.close()

    async def trim_feed(self, *before: str) -> None:
        if not before:
            return
        cursors = [read_cursor(cursor, self._keys.shards) for cursor in before]
        earliest = [min(places, key=position) for places in zip(*cursors, strict=True)]
        trimmed = [
            self._link.call(b"XTRIM", feed, b"MINID", place)
            for feed, place in zip(self._keys.feeds, earliest, strict=True)
        ]
        for reply in trimmed:
            await reply

    def subscribe(self, *types: str, after: str = "0") -> Subscription:
        return Subscription(self, types, after)

    # mail

    async def send_mail(self, log: str, *events: Event) -> None:
        bodies: dict[Lane, list[bytes]] = {"control": [], "data": []}
        for event in events:
            bodies[lane_of(event)].append(self._codec.encode(event, codec.mail(log)))
        keys, limits = self._keys.log(log), self._address.limits
        length = await logs.send_mail(
            self._link, keys, bodies["data"], bodies["control"], limits.mail
        )
        limits.check_mail(log, length)
        telemetry.MAILED.add(len(events))

    async def bury_mail(self, mail: Mail, reason: str) -> None:
        keys = self._keys.log(mail.log)
        stream = keys.control if mail.lane == "control" else keys.mail
        entry = (mail.id.encode(), [BODY, self._codec.encode(mail.event, codec.mail(mail.log))])
        await self._dead.bury_mail(mail.log, stream, entry, reason)
        telemetry.DEAD.add()

    def mailbox(self, log: str, lane: Lane | None = None) -> Mailbox:
        keys = self._keys.log(log)
        streams: dict[Lane, bytes] = {"control": keys.control, "data": keys.mail}
        followed = [stream for name, stream in streams.items() if lane in (name, None)]
        following = self._follows.following(*followed)
        return Mailbox(following, log, self._mail_event, partial(self._bury_mail, log))

    # queues

    async def put(self, queue: str, *events: Event, at: datetime | None = None) -> None:
        keys, limits = self._keys.queue(queue), self._address.limits
        place = codec.queue(queue)
        bodies = [self._codec.encode(event, place) for event in events]
        delay_s = 0.0 if at is None else (at - datetime.now(UTC)).total_seconds()
        delay_ms = max(round(delay_s * 1000), 0)
        length = await queues.put(self._link, keys, bodies, limits.queue, delay_ms)
        limits.check_queue(queue, length)
        if delay_s > 0:
            self._timers.set(keys, delay_s)
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
    ) -> AsyncGenerator[RedisConsumer]:
        if self._tasks is None:
            raise BusUnavailableError(f"bus {self._address.url} is not open: use `async with`")
        place = RedisConsumer(
            self._services,
            queue,
            self._keys.queue(queue),
            name=f"{consumer}-{token_hex(4)}",  # two of one name would hold each other's work
            credit=credit,
            lease_s=lease_s,
            past_deadline=past_deadline,
        )
        self._consumers.add(place)
        self._tasks.start_soon(place.run)
        try:
            yield place
        finally:
            await place.close()
            self._consumers.discard(place)

    async def backlog(self, queue: str) -> int:
        return await queues.backlog(self._link, self._keys.queue(queue))

    async def dead_letter_queues(self) -> list[str]:
        return await self._dead.queues()

    async def dead_letters(self, queue: str, *, limit: int = 10_000) -> list[DeadLetter]:
        return await self._dead.of(queue, limit)

    async def requeue(self, queue: str, dead_letter_id: str) -> None:
        await self._dead.requeue(queue, dead_letter_id)

    async def drop(self, queue: str, dead_letter_id: str) -> None:
        await self._dead.drop(queue, dead_letter_id)

    async def request(self, queue: str, event: Event, *, timeout_s: float) -> Event:
        key = self._keys.reply(event.id)
        waiting = Waiting()
        with self._hints.hearing(key, waiting.hear) as confirmed:
            with anyio.move_on_after(timeout_s):
                await self._hints.confirm(confirmed)
                await self.put(queue, due_within(event, timeout_s, self.now()))
                while not await waiting.wait(SWEEP_S):
                    waiting.hear(await self._link.call(b"GET", key) or b"")
            if waiting.answer:
                return self._codec.decode(waiting.answer, codec.reply(event.id))
        raise RequestTimeoutError(
            f"no reply to {event.type} {event.id} on queue {queue!r} within {timeout_s} s"
        )

    async def reply(self, request: Event, answer: Event) -> None:
        if request.episode_id is not None:
            await self.send_mail(episode_log(request.episode_id), answer)
        else:
            body = self._codec.encode(answer, codec.reply(request.id))
            await nodes.reply(self._link, self._keys.reply(request.id), body)

    # broadcasts

    async def broadcast(self, channel: str, value: JsonValue) -> None:
        body = broadcast_body(channel, value)
        # All over one node of a cluster, which keeps one sender's broadcasts in order whatever their channels.
        to = self._keys.broadcast(channel)
        said = self._link.say(b"PUBLISH", to, body, key=self._keys.nodes)
        with suppress(BusUnavailableError), anyio.move_on_after(SILENT_S):
            await said

    @asynccontextmanager
    async def listen(self, channel: str) -> AsyncGenerator[AsyncIterator[JsonValue]]:
        listener = Listener()
        with self._hints.hearing(self._keys.broadcast(channel), listener.hear) as confirmed:
            await self._hints.confirm(confirmed)
            yield listener

    # membership

    async def announce(self, node: NodeInfo, *, ttl_s: float = 5.0) -> None:
        body = node.model_copy(update={"seen": self.now()}).model_dump_json().encode()
        place = self._node_field(node.name)
        await nodes.announce(self._link, self._keys.nodes, place, body, round(ttl_s * 1000))

    async def withdraw(self, name: str) -> None:
        await self._link.call(b"HDEL", self._keys.nodes, self._node_field(name))

    async def nodes(self) -> list[NodeInfo]:
        found = await nodes.nodes(self._link, self._keys.nodes)
        return [NodeInfo.model_validate_json(body) for body in found]

    # inside

    def _node_field(self, name: str) -> str:
        return f"{name} {self._token}"

    async def _run_loops(self) -> None:
        """Shielded: whoever uses the bus and is cancelled still gives back what it holds, over these."""
        with self._loops:
            async with anyio.create_task_group() as loops:
                loops.start_soon(self._link.run)
                loops.start_soon(self._hints.run)
                loops.start_soon(self._hints.keep_alive)
                loops.start_soon(self._follows.run)
                loops.start_soon(self._timers.run)

    async def _connect(self) -> None:
        """The first connection, and whether the server will do.

        Raises:
            NoBusError: no server.
            ConfigError: one that would lose events, is too old, refuses the password, isn't trusted, or has TLS
                where the URL has none, or the other way round.
        """
        began = time.monotonic()
        try:
            facts = await self._link.connect()
        except Unreachable as error:
            if wrong := await mismatch(self._address.server_url):
                raise ConfigError(f"bus {self._address.url}: {wrong}") from error
            raise NoBusError(
                f"no bus at {self._address.url} ({error}; tried for {time.monotonic() - began:.1f} s):"
                " start a Redis or Valkey server there, or give the URL of a running one"
            ) from error
        if microseconds := facts.get("server_time_usec"):
            self._clock.hear(divmod(int(microseconds), 1_000_000))

    def _reconnected(self) -> None:
        self._follows.suspect_all()

    async def _stands(self, log: str, expected_seq: int, events: Sequence[Event]) -> bool:
        """Whether these very events stand there: the append was made and its reply lost."""
        if not events:
            return False
        there = await self.read(log, expected_seq + 1, limit=len(events))
        return [event.id for event in there] == [event.id for event in events]

    async def _bury_mail(self, log: str, stream: bytes, entry: Entry, reason: str) -> None:
        try:
            await self._dead.bury_mail(log, stream, entry, reason)
        except BusFullError as error:
            # It stays where it is: the log's next owner tries again, or it goes with the log.
            logger.warning("mail to %s that can't be read is not among the dead: %s", log, error)
            return
        telemetry.DEAD.add()

    async def _events(self, log: str, kept: Sequence[Kept]) -> list[Event]:
        """What is kept in a log, with its large content."""
        opened = [self._codec.opened(one, log) for one in kept]
        wanted = references(one.body for one in opened)
        keys = self._keys.log(log)
        blobs = await logs.blobs_of(self._link, keys, wanted) if wanted else NONE
        return self._codec.decode_opened(opened, blobs, log=log, at=self.url)

    def _mail_event(self, body: bytes, log: str) -> Event:
        return self._codec.decode(body, codec.mail(log))


def _forks_at(expected_seq: int, events: Sequence[Event]) -> bool:
    """Whether the batch may begin a log in the middle."""
    if expected_seq <= 0 or not events:
        return False
    first = events[0].data
    return isinstance(first, EpisodeForked) and first.at == expected_seq
