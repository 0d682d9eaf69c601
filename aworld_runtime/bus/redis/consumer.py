"""Taking work from a queue.

    take ─▶ wanted ─▶ run: [move what is due, take over expired leases] ─▶ XREADGROUP ─▶ buffer ─▶ take ─▶ held
                       ▲                                                                            │
                       └───────────── room again ◀── ack / retry / dead letter ◀────────────────────┘

The reader has a connection of its own and is never cancelled while it blocks on it: what the server
has handed out would be stranded. It stops by flag. It reads only while somebody waits in `take`, one
piece at first and more at a time the faster they are taken; what lies in the buffer for half a lease
is given back, so that a slow consumer keeps nothing from the others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import anyio

from aworld_runtime import telemetry
from aworld_runtime.bus.backoff import backoff_s
from aworld_runtime.bus.base import MAX_DELIVERIES, Delivery, Standing, too_late
from aworld_runtime.bus.redis import codec
from aworld_runtime.bus.redis.awake import Awake
from aworld_runtime.bus.redis.clock import Clock
from aworld_runtime.bus.redis.codec import Codec
from aworld_runtime.bus.redis.entries import BODY, DELIVERIES, FAILURES
from aworld_runtime.bus.redis.heartbeat import Heartbeat, Lease
from aworld_runtime.bus.redis.keys import QueueKeys
from aworld_runtime.bus.redis.link import FIRST_PAUSE_S, FULL, LONGEST_PAUSE_S, Link
from aworld_runtime.bus.redis.scripts import queues
from aworld_runtime.bus.redis.scripts.queues import Held
from aworld_runtime.bus.redis.timers import Timers
from aworld_runtime.bus.redis.wire import (
    REPLY_S,
    Command,
    Reply,
    ReplyError,
    TooLarge,
    Unreachable,
    Wire,
    denial,
    pack,
)
from aworld_runtime.errors import (
    AccessDeniedError,
    BusError,
    BusFullError,
    BusUnavailableError,
    ConfigError,
    EventError,
)
from aworld_runtime.events import REFUSE_ABOVE, Event

logger = logging.getLogger(__name__)

BLOCK_S = 0.5
"""Longest wait in one read."""
TEND_S = 0.25
"""How often at least a waiting consumer looks for expired leases and delayed work. It knows when the next lease runs out."""
SHARE = 4
"""Expired leases taken over at once. All that wait look at the same moment, so that the work of a dead consumer is
spread over them."""
QUICK_S = 0.1
"""A buffer emptied within this time may be twice as large the next time. So long at most does a
consumer that stops taking keep work from the others, beside what it gives back after half a lease."""
CLOSE_S = 3.0
READ_MOST = 64 * 1024 * 1024
"""Bytes in one reply. What is larger is read one by one, and buried unread where one alone is."""
ACK_BATCH = 1000
"""Deliveries settled in one step; Lua's stack holds a few thousand."""


@dataclass(frozen=True, slots=True, eq=False)
class _Taker:
    """Somebody who waits for work."""

    woken: asyncio.Future[None]
    at_most: int


@dataclass(frozen=True)
class Services:
    """What consumers of one bus share."""

    link: Link
    timers: Timers
    heartbeat: Heartbeat
    codec: Codec
    clock: Clock
    dead_queues: bytes
    """Key of the set of queues that have dead letters."""
    outage_s: float


class RedisDelivery:
    """Implements `Delivery`."""

    __slots__ = ("_consumer", "_event", "_failures", "count", "id", "lost", "read_at")

    def __init__(
        self,
        consumer: RedisConsumer,
        entry_id: bytes,
        event: Event,
        count: int,
        failures: int,
        read_at: float,
    ) -> None:
        self.id = entry_id
        self.count = count
        self.lost = False
        self.read_at = read_at
        self._consumer = consumer
        self._event = event
        self._failures = failures

    @property
    def event(self) -> Event:
        return self._event

    @property
    def queue(self) -> str:
        return self._consumer.queue

    async def standing(self) -> Standing:
        consumer = self._consumer
        standing = await queues.standing(
            consumer.services.link, consumer.keys, consumer.name, self.id
        )
        # What is held again after a loss is another delivery.
        return "taken" if self.lost and standing == "held" else standing

    async def ack(self) -> None:
        await self._consumer.ack((self,))

    async def retry(self, after_s: float | None, reason: str) -> bool:
        if self._failures + 1 >= MAX_DELIVERIES:
            return not await self._bury(reason)
        consumer = self._consumer
        if consumer.settling(self):
            delay_s = backoff_s(self._failures + 1) if after_s is None else after_s
            delay_ms = max(round(delay_s * 1000), 0)
            try:
                done = await queues.again(
                    consumer.services.link, consumer.keys, self._held(), delay_ms
                )
                self.lost = not done
                telemetry.RETRIED.add(done)
                telemetry.LOST_LEASES.add(not done)
                if delay_ms:
                    consumer.services.timers.set(consumer.keys, delay_ms / 1000)
            finally:
                consumer.freed()
        return True

    async def dead_letter(self, reason: str) -> None:
        await self._bury(reason)

    async def _bury(self, reason: str) -> bool:
        """Whether it was this delivery's to bury."""
        consumer = self._consumer
        if not consumer.settling(self):
            return False
        try:
            done = await consumer.bury(self._held(), reason)
            self.lost = not done
            telemetry.DEAD.add(done)
            telemetry.LOST_LEASES.add(not done)
        finally:
            consumer.freed()
        return done

    def _held(self) -> Held:
        return Held(self._consumer.name, self.id, self.count, self._failures)


class RedisConsumer:
    """Implements `Consumer`. `run` is its reader, a task of the bus; `close` ends it."""

    def __init__(
        self,
        services: Services,
        queue: str,
        keys: QueueKeys,
        *,
        name: str,
        credit: int,
        lease_s: float,
        past_deadline: bool,
    ) -> None:
        self.services = services
        self.queue = queue
        self.keys = keys
        self.name = name
        self._credit = credit
        self._lease_s = lease_s
        self._past_deadline = past_deadline
        self._buffer: deque[RedisDelivery] = deque()
        self._held: dict[bytes, RedisDelivery] = {}
        self._unsettled = 0
        """Taken, and not settled at the server yet."""
        self._takers: deque[_Taker] = deque()
        self._wanted = anyio.Event()
        self._finished = anyio.Event()
        self._stopping = False
        self._abandoned = False
        self._error: BusError | None = None
        self._wire: Wire | None = None
        self._client_id = b""
        self._window = 1
        self._too_large = False
        """The last reply was not read, as it had too many bytes."""
        self._at_once = credit
        """Most to ask for at once: little after what was too large or too slow, then twice as much each time."""
        self._filled_at = 0.0
        self._next_tending = 0.0
        self._refused_s = 0.0
        """How long it has waited last because the server is full."""
        self._lease = Lease(keys.work, name, lease_s, self._held)
        self._scope = anyio.CancelScope(shield=True)
        telemetry.HELD.watch(self, RedisConsumer.unsettled, queue)

    # for the caller

    async def take(self) -> RedisDelivery:
        return (await self.take_many(1))[0]

    async def take_many(self, at_most: int) -> list[RedisDelivery]:
        while True:
            if self._abandoned:
                await anyio.sleep_forever()
            if self._stopping:
                raise self._error or BusUnavailableError(
                    f"consumer {self.name!r} of queue {self.queue!r} is closed"
                )
            taken: list[RedisDelivery] = []
            while len(taken) < at_most and (delivery := self._pop()):
                taken.append(delivery)
            if taken:
                telemetry.DELIVERED.add(len(taken))
                return taken
            await self._wait(at_most)

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        ours = {d.id: d for d in deliveries if isinstance(d, RedisDelivery) and self.settling(d)}
        ids = sorted(ours, key=_in_order)
        try:
            for begin in range(0, len(ids), ACK_BATCH):
                batch = ids[begin : begin + ACK_BATCH]
                losses = await self._ack_when_possible(batch)
                for lost in losses:
                    ours[lost].lost = True
                telemetry.ACKED.add(len(batch) - len(losses))
                telemetry.LOST_LEASES.add(len(losses))
        finally:
            self.freed(len(ids))

    def abandon(self) -> None:
        self._abandoned = True
        self._lease.renewing = False
        self._stop()

    # for deliveries

    def settling(self, delivery: RedisDelivery) -> bool:
        """Whether it is still to be settled; from now on its lease is not renewed."""
        if self._held.get(delivery.id) is not delivery:
            return False
        del self._held[delivery.id]
        if delivery.lost:
            self.freed()
            return False
        return True

    def freed(self, number: int = 1) -> None:
        """So many pieces less are held."""
        self._unsettled -= number
        if self._buffer:
            self._wake_takers(number)
        elif self._takers:
            self._wanted.set()

    def unsettled(self) -> int:
        """Deliveries that were taken and are not settled."""
        return self._unsettled

    async def bury(self, held: Held, reason: str) -> bool:
        """Make work a dead letter of a queue that is known to have some; whether it was held."""
        link = self.services.link
        await link.call(b"SADD", self.services.dead_queues, self.queue)
        return await queues.bury(link, self.keys, held, reason)

    # for the bus

    async def run(self) -> None:
        """Read until stopped."""
        try:
            with self._scope:
                await self._read_through_outages()
        except BusError as error:
            self._error = error
        finally:
            self._stop()
            if self._wire is not None:
                self._wire.drop()
                self._wire = None
            self._finished.set()

    def stop(self) -> None:
        """Take no more."""
        self._stop()

    async def close(self) -> None:
        """Stop reading, and give back at once what is not settled."""
        self._stop()
        link = self.services.link
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(CLOSE_S):
                if self._client_id:
                    try:
                        await link.call(b"CLIENT", b"UNBLOCK", self._client_id, key=self.keys.work)
                    except BusError as error:
                        logger.debug("reader of %s not unblocked: %s", self.queue, error)
                await self._finished.wait()
            self._scope.cancel()
            await self._finished.wait()
            self.services.heartbeat.remove(self._lease)
            if not self._abandoned:
                with anyio.move_on_after(CLOSE_S):
                    await self._give_back_all()

    # inside

    def _pop(self) -> RedisDelivery | None:
        """The oldest in the buffer. What is stale there is left to the reader, who gives it back."""
        now = time.monotonic()
        if not self._buffer or self._stale(self._buffer[0], now):
            return None
        delivery = self._buffer.popleft()
        if not self._buffer:
            quick = now - self._filled_at < QUICK_S
            self._window = min(self._window * 2, self._credit) if quick else 1
            self._at_once = min(self._at_once * 2, self._credit)
        self._held[delivery.id] = delivery
        self._unsettled += 1
        return delivery

    def _stale(self, delivery: RedisDelivery, now: float) -> bool:
        """Whether it has lain in the buffer so long that it may not be ours much longer."""
        return now - delivery.read_at >= self._lease_s / 2

    async def _ack_when_possible(self, ids: Sequence[bytes]) -> Sequence[bytes]:
        """Settle as done. A server whose memory is full does it; one whose disk is full, once it isn't any more."""
        deadline = time.monotonic() + self.services.outage_s
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return await queues.ack(self.services.link, self.keys, self.name, ids)
            except BusFullError:
                if time.monotonic() >= deadline:
                    raise
            await anyio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _wait(self, at_most: int) -> None:
        taker = _Taker(asyncio.get_running_loop().create_future(), at_most)
        self._takers.append(taker)
        self._wanted.set()
        try:
            await taker.woken
        except BaseException:
            if taker in self._takers:
                self._takers.remove(taker)
            else:
                self._wake_takers(at_most)  # woken and cancelled at once: another may take it
            raise

    def _wake_takers(self, number: int) -> None:
        while number > 0 and self._takers:
            taker = self._takers.popleft()
            if not taker.woken.done():
                taker.woken.set_result(None)
                number -= taker.at_most

    def _stop(self) -> None:
        self._stopping = True
        self._wanted.set()
        self._wake_takers(sum(taker.at_most for taker in self._takers))

    async def _read_through_outages(self) -> None:
        self.services.heartbeat.add(self._lease)
        awake, away_since = Awake(), None
        pause_s = FIRST_PAUSE_S
        while not self._stopping:
            try:
                if self._wire is None:
                    await self._connect()
                away_since, pause_s = None, FIRST_PAUSE_S
                await self._read_while_wanted()
            except TooLarge as error:
                logger.warning("queue %r: %s; its work is read one by one", self.queue, error)
                self._wire = None
                self._too_large, self._at_once = True, 1
            except (Unreachable, ConfigError) as error:
                self._wire = None
                now = awake.now()
                away_since = now if away_since is None else away_since
                if now - away_since > self.services.outage_s:
                    raise BusUnavailableError(
                        f"queue {self.queue!r}: the bus has not answered for"
                        f" {self.services.outage_s:g} s: {error}"
                    ) from error
                await anyio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _connect(self) -> None:
        wire = await self.services.link.dial(self.keys.work)
        (client_id,) = await wire.exchange(pack([(b"CLIENT", b"ID")]), 1)
        self._client_id = str(client_id).encode()
        wire.most_bytes = READ_MOST
        self._wire = wire
        await self._exchange(queues.join_command(self.keys))
        if self._too_large:
            most = 2 * REFUSE_ABOVE
            await self._exchange(queues.bury_large_command(self.keys, self.name, most))
            self._too_large = False

    async def _read_while_wanted(self) -> None:
        while not self._stopping:
            await self._return_stale()
            room = self._room()
            if room < 1:
                await self._wait_until_wanted()
                continue
            if time.monotonic() >= self._next_tending:
                room -= await self._tend(room)
            # What has come back, and is still there, comes before younger work.
            if room > 0 and not self._stopping and time.monotonic() < self._next_tending:
                await self._read(room)

    def _room(self) -> int:
        """How many more to ask for. None while nobody waits: the buffer serves who does."""
        if not self._takers:
            return 0
        free = self._credit - self._unsettled - len(self._buffer)
        free = min(free, self._at_once)
        return min(free, max(self._window, sum(taker.at_most for taker in self._takers)))

    async def _wait_until_wanted(self) -> None:
        self._wanted = anyio.Event()
        if self._room() > 0 or self._stopping:
            return
        if not self._buffer:
            await self._wanted.wait()
            return
        with anyio.move_on_after(self._buffer[0].read_at + self._lease_s / 2 - time.monotonic()):
            await self._wanted.wait()

    async def _tend(self, room: int) -> int:
        """Move delayed work that is due and take over expired leases; how many."""
        claim = queues.claim_command(
            self.keys,
            self.name,
            round(self._lease_s * 1000),
            count=min(room, SHARE),
            ahead_ms=round(TEND_S * 1000),
        )
        promote = queues.promote_command(self.keys)
        due_ms, claimed, now = await self._exchange(promote, claim, (b"TIME",))
        self.services.clock.hear(now)
        found, expires_ms = claimed or (None, -1)
        next_s = [ms / 1000 for ms in (due_ms, expires_ms) if isinstance(ms, int) and ms >= 0]
        self._next_tending = time.monotonic() + min([TEND_S, *next_s])
        return await self._receive(found)

    async def _read(self, room: int) -> None:
        wait_s = min(max(self._next_tending - time.monotonic(), 0.001), BLOCK_S)
        block_ms = max(round(wait_s * 1000), 1) if not self._buffer else None
        command = queues.read_command(self.keys, self.name, room, block_ms)
        (reply,) = await self._exchange(command)
        if reply:
            await self._receive([(entry_id, fields, 1) for entry_id, fields in reply[0][1]])

    async def _exchange(self, *commands: Command) -> list[Reply]:
        if self._wire is None:
            raise Unreachable("not connected")
        replies = await self._wire.ask(commands, patience_s=BLOCK_S + REPLY_S)
        errors = [reply for reply in replies if isinstance(reply, ReplyError)]
        if not errors:
            self._refused_s = 0.0
            return replies
        if denied := next((error for error in errors if error.denied), None):
            raise AccessDeniedError(denial(self.services.link.place(self.keys.work), denied))
        if other := [error for error in errors if error.code not in {"NOGROUP", *FULL}]:
            self._wire.drop()
            raise Unreachable(str(other[0]))
        refused = next((error for error in errors if error.code in FULL), None)
        if refused is None:
            # The server came back empty, or somebody deleted the queue: it begins anew.
            if not self._refused_s:
                logger.warning("queue %r is gone from the server; it begins anew", self.queue)
            (joined,) = await self._wire.ask([queues.join_command(self.keys)])
            refused = joined if isinstance(joined, ReplyError) else None
        if refused is not None:
            await self._wait_for_room(refused)
        return [None if isinstance(reply, ReplyError) else reply for reply in replies]

    async def _wait_for_room(self, refused: ReplyError) -> None:
        """A full server serves what it has, but makes no queue and moves no delayed work: ask it less often."""
        if not self._refused_s:
            logger.warning("queue %r waits until the bus has room: %s", self.queue, refused)
        self._refused_s = min(max(2 * self._refused_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
        await anyio.sleep(self._refused_s)

    async def _receive(self, found: list[tuple[bytes, list[bytes], int]] | None) -> int:
        """Put what was read into the buffer and wake who waits for it."""
        fresh = 0
        now = time.monotonic()
        place = codec.queue(self.queue)
        for entry_id, fields, deliveries in found or ():
            if held := self._held.get(entry_id):
                if not held.lost:
                    continue  # ours all the time; only our heartbeat was late
                del self._held[entry_id]  # others had it meanwhile: it is delivered anew
                self.freed()
            body, count, failures = _work(fields)
            count += deliveries
            try:
                event = self.services.codec.decode(body, place)
            except EventError as error:
                held = Held(self.name, entry_id, count, failures)
                await self._bury(held, f"{type(error).__name__}: {error}")
                continue
            reason = None if self._past_deadline else too_late(event, self.services.clock.now)
            if reason is not None:
                await self._bury(Held(self.name, entry_id, count, failures), reason)
                continue
            self._buffer.append(RedisDelivery(self, entry_id, event, count, failures, now))
            fresh += 1
        if fresh:
            self._filled_at = now
            self._wake_takers(fresh)
        return fresh

    async def _bury(self, held: Held, reason: str) -> None:
        try:
            if await self.bury(held, reason):
                telemetry.DEAD.add()
                logger.warning("work on queue %r is a dead letter: %s", self.queue, reason)
        except BusError as error:
            # It stays pending and is buried when its lease has run out.
            logger.warning("dead work on queue %r not buried yet: %s", self.queue, error)

    async def _return_stale(self) -> None:
        stale: list[tuple[bytes, bool]] = []
        now = time.monotonic()
        while self._buffer and self._stale(self._buffer[0], now):
            stale.append((self._buffer.popleft().id, False))
        if stale:
            self._window = self._at_once = 1
            self._next_tending = 0.0  # if nobody else takes it: it comes before younger work
            await self._release(stale)

    async def _give_back_all(self) -> None:
        unsettled = [(delivery.id, False) for delivery in self._buffer]
        unsettled += [(delivery.id, True) for delivery in self._held.values()]
        self._buffer.clear()
        self._held.clear()
        await self._release(unsettled)
        try:
            await queues.leave(self.services.link, self.keys, self.name)
        except BusError as error:
            logger.debug("consumer %s not removed: %s", self.name, error)

    async def _release(self, ids: list[tuple[bytes, bool]]) -> None:
        try:
            await queues.release(self.services.link, self.keys, self.name, ids)
        except BusError as error:
            # Their leases run out, then others take them over.
            logger.warning("%d deliveries of %r not given back: %s", len(ids), self.queue, error)


def _work(fields: list[bytes]) -> tuple[bytes, int, int]:
    """Body, earlier deliveries and failures of an entry."""
    if len(fields) == 2 and fields[0] == BODY:  # the first time: nothing else is written
        return fields[1], 0, 0
    values = dict(zip(fields[::2], fields[1::2], strict=True))
    return values.get(BODY, b""), int(values.get(DELIVERIES, 0)), int(values.get(FAILURES, 0))


def _in_order(entry_id: bytes) -> tuple[int, bytes, int, bytes]:
    """Sorts ids as their numbers do, without making any."""
    milliseconds, _, number = entry_id.partition(b"-")
    return len(milliseconds), milliseconds, len(number), number
