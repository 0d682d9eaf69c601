"""A bus whose every answer is compared with the model's (bus_model.py)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar
from uuid import uuid4

import anyio
import pytest

from aworld_runtime.bus import Bus, Consumer, Delivery, FeedEntry, Mail
from aworld_runtime.bus.base import lane_of
from aworld_runtime.errors import Fenced, NotFoundError, QueueFullError, RequestTimeoutError
from aworld_runtime.events import (
    EpisodeCancelled,
    EpisodeForked,
    EpisodeTakenOver,
    Event,
    EventData,
    MessagePosted,
    utc_now,
)
from aworld_runtime.names import episode_log
from tests.contracts.bus_model import (
    NEVER,
    Held,
    Letter,
    ModelLog,
    ModelQueue,
    Work,
)
from tests.waiting import wait_until

T = TypeVar("T")

DEADLINE_S = 5.0
QUEUE_LIMIT, MAIL_LIMIT = 8, 4
LIMITS = f"queue_limit={QUEUE_LIMIT}&mail_limit={MAIL_LIMIT}"
"""For the bus's URL."""
BACKOFF_S = 1.0
"""The longest wait before a retry that names none: the second."""
MILLISECOND_S = 0.002
"""A server counts these, and rounds."""
TRIES = 5
BLINK_S = 0.03
"""How long nothing must come where nothing may come."""


@dataclass(eq=False)
class Member:
    """A consumer."""

    name: str
    queue: str
    consumer: Consumer
    place: AbstractAsyncContextManager[Consumer]
    room: int
    """How much more it may hold."""
    told: bool = True
    """It learns of what it loses: not when it has left, nor while it is stopped."""


@dataclass(eq=False)
class Taken:
    """What a consumer got, and whether it has said what became of it."""

    held: Held
    member: Member
    settled: bool = False

    @property
    def queue(self) -> str:
        return self.member.queue

    @property
    def delivery(self) -> Delivery:
        return self.held.delivery


@dataclass(eq=False)
class Owner:
    """Of an episode, as it believes."""

    bus: Bus
    log: str
    seq: int
    box: AsyncIterator[list[Mail]]
    recorded: set[str]
    """Events that it knows to be in the log."""
    seen: list[Letter] = field(default_factory=list[Letter])
    unrecorded: list[Mail] = field(default_factory=list[Mail])
    last_append: tuple[int, list[Event], list[Mail]] | None = None


async def soon(awaitable: Awaitable[T]) -> T:
    """What the awaitable gives, which must be soon."""
    with anyio.fail_after(DEADLINE_S):
        return await awaitable


async def _accepts(limit: int, there: tuple[int, int], sending: Awaitable[None]) -> bool:
    """Whether more is taken where so much waits already, at least and at most."""
    try:
        await soon(sending)
    except QueueFullError:
        assert there[1] >= limit, f"refused, though there is room: {there}"
        return False
    assert there[0] < limit, f"accepted, though it is full: {there}"
    return True


async def nothing_from(awaitable: Awaitable[object]) -> None:
    with anyio.move_on_after(BLINK_S) as scope:
        unexpected = await awaitable
        raise AssertionError(f"{unexpected} came, and nothing was there to come")
    assert scope.cancelled_caught


class CheckedBus:
    """Two clients of one bus, and the model of it.

    With `exact` time, all that the bus says is known before; else what is only due may have happened or not.
    """

    def __init__(
        self,
        *clients: Bus,
        lease_s: float,
        exact: bool,
        renew: Callable[[str, bool], None] | None = None,
    ) -> None:
        self.clients = clients
        self.logs: dict[str, ModelLog] = {}
        self.queues: dict[str, ModelQueue] = {}
        self._lease_s = lease_s
        self._exact = exact
        self._renew = renew
        """Says of a consumer whether its leases are renewed; None where its process can't be stopped alone."""
        self._cursor = self._told_last = "0"
        self._places: dict[str, int] = {}
        """How many appends of each log lie before the cursor."""
        self._made = 0
        self._members: list[Member] = []
        self._open = AsyncExitStack()

    async def aclose(self) -> None:
        await self._open.aclose()

    def event(self, data: EventData, **metadata: object) -> Event:
        self._made += 1
        return Event.of(data, source=f"writer/{self._made}", **metadata)

    def note(self, text: str) -> Event:
        return self.event(MessagePosted(content=text))

    def log(self, name: str) -> ModelLog:
        log = self.logs.setdefault(name, ModelLog(name))
        log.forget(anyio.current_time())
        return log

    def queue(self, name: str) -> ModelQueue:
        return self.queues.setdefault(name, ModelQueue(self._exact))

    # consumers

    async def join(self, queue: str, credit: int, client: int) -> Member:
        name = f"consumer-{uuid4().hex[:8]}"
        bus, model = self.clients[client], self.queue(queue)
        place = bus.consume(queue, consumer=name, credit=credit, lease_s=self._lease_s)
        consumer = await place.__aenter__()
        self._open.push_async_callback(place.__aexit__, None, None, None)
        model.joined(alone=all(member.queue != queue for member in self._members))
        self._members.append(Member(name, queue, consumer, place, credit))
        return self._members[-1]

    async def leave(self, member: Member) -> None:
        await member.place.__aexit__(None, None, None)
        member.told = False
        self.queue(member.queue).release(member.name, anyio.current_time())
        self._members.remove(member)

    async def crash(self, member: Member) -> None:
        member.consumer.abandon()
        model = self.queue(member.queue)
        model.expire(member.name, anyio.current_time() + self._lease_s)
        self._members.remove(member)

    def freeze(self, member: Member) -> None:
        """Its process is stopped, where it can be."""
        if self._renew is not None:
            self._renew(member.name, False)
            member.told = False
            self.queue(member.queue).expire(member.name, anyio.current_time() + self._lease_s)

    async def thaw(self, member: Member) -> None:
        """It goes on, and learns of what it lost."""
        if self._renew is not None:
            self._renew(member.name, True)
            member.told = True
            self.queue(member.queue).renew(member.name)
            await anyio.sleep(self._lease_s / 2)

    async def work_slowly(self, queue: str) -> None:
        """Who lives keeps its work for longer than a lease; unless the machine is too busy, which it isn't always."""
        for _ in range(TRIES):
            if not await self._is_stolen(queue):
                return
        raise AssertionError("work was taken from who is alive, again and again")

    async def _is_stolen(self, queue: str) -> bool:
        one, other = [
            bus.consume(queue, consumer=f"worker-{uuid4().hex[:8]}", lease_s=self._lease_s)
            for bus in self.clients
        ]
        async with one as slow, other as thief:
            await self.clients[0].put(queue, self.note("slow work"))
            delivery = await soon(slow.take())
            with anyio.move_on_after(1.5 * self._lease_s):
                await (await thief.take()).ack()
                return True
            await delivery.ack()
            return False

    async def take(self, member: Member, at_most: int) -> list[Taken]:
        """What must come soon does, and what may not come doesn't; where neither is sure, nothing is tried."""
        model, began = self.queue(member.queue), anyio.current_time()
        if not member.room:
            return []
        if not model.sure(began + 2 * self._lease_s):
            if all(work.since > began + 2 * BLINK_S for work in model.wanted()):
                await self._take_nothing(member)
            return []
        rounding_s = 0.0 if self._exact else MILLISECOND_S
        asked = began - rounding_s
        sure = len(model.sure(asked))
        deliveries = await soon(member.consumer.take_many(at_most))
        now = anyio.current_time() + rounding_s
        assert 0 < len(deliveries) <= min(at_most, member.room)
        assert not self._exact or len(deliveries) >= min(at_most, member.room, sure), (
            "more is there"
        )
        member.room -= len(deliveries)
        taken: list[Taken] = []
        for delivery in deliveries:
            held = model.deliver(
                delivery,
                member.name,
                asked=asked,
                now=now,
                elsewhere=await self._held_still(delivery),
            )
            if not self._exact:
                # What was in a consumer's buffer has lived half its lease when it is taken, at most.
                held.work.since = max(began - self._lease_s / 2, held.free_since) + self._lease_s
            taken.append(Taken(held, member))
        return taken

    async def _held_still(self, delivery: Delivery) -> list[Work]:
        """The copies of its event of which the bus says that somebody has them."""
        model = self.queue(delivery.queue)
        return [
            work
            for work in model.work
            if work.event.id == delivery.event.id
            and work.holder is not None
            and await work.holder.delivery.standing() == "held"
        ]

    async def _take_nothing(self, member: Member) -> None:
        await nothing_from(member.consumer.take())

    async def ack(self, *several: Taken) -> None:
        await several[0].member.consumer.ack([taken.delivery for taken in several])
        for taken in several:
            if self._counted(taken):
                self.queue(taken.queue).settle(taken.held)

    async def retry(self, taken: Taken, after_s: float | None) -> None:
        reason, began, first = "it failed", anyio.current_time(), not taken.settled
        comes = await taken.delivery.retry(after_s, reason)
        if self._counted(taken):
            now = anyio.current_time()
            again = (
                (began, now + BACKOFF_S) if after_s is None else (began + after_s, now + after_s)
            )
            self.queue(taken.queue).fail(taken.held, reason, again, comes=comes)
        else:
            assert comes or not first, "it was not its holder's to end"

    async def give_up(self, taken: Taken) -> None:
        await taken.delivery.dead_letter("given up")
        if self._counted(taken):
            self.queue(taken.queue).bury(taken.held.work, "given up")

    async def ask(self, taken: Taken) -> None:
        """Whose it is; who has lost it to another learns so."""
        model, held = self.queue(taken.queue), taken.held
        told = taken.member.told and not taken.settled
        if told and held.work.holder and held.work.holder.former is held:
            await wait_until(lambda: taken.delivery.lost, description="that its loss is known")
        standing = await taken.delivery.standing()
        if held.work.holder is not held:
            assert standing != "held"
        elif held.work not in model.work:
            assert standing == "gone"
        elif model.counts(held, anyio.current_time()):
            assert standing == "held"

    def _counted(self, taken: Taken) -> bool:
        """Whether what was just said of it did; it is the first time that counts."""
        counts = self.queue(taken.queue).counts(taken.held, anyio.current_time())
        if taken.settled:
            return False
        taken.settled = True
        taken.member.room += 1
        return not taken.delivery.lost if counts is None else counts

    # work

    async def put(self, queue: str, *events: Event, client: int = 0, late: bool = False) -> None:
        copies = [event.model_copy() for event in events]  # in memory they are told apart so
        putting = self.clients[client].put(queue, *copies)
        if await _accepts(QUEUE_LIMIT, self._unsettled(queue), putting):
            now = anyio.current_time()
            for event in copies:
                self.queue(queue).add(event, now, now, late=late)

    async def put_later(self, queue: str, event: Event, after_s: float) -> None:
        began, event = anyio.current_time(), event.model_copy()
        putting = self.clients[0].put(queue, event, at=utc_now() + timedelta(seconds=after_s))
        if await _accepts(QUEUE_LIMIT, self._unsettled(queue), putting):
            since = began + after_s * 0.9  # wall time passes, even where the loop's stands still
            self.queue(queue).add(event, since, anyio.current_time() + after_s, delayed=True)

    async def see_to_dead(self, queue: str, pick: int, *, again: bool) -> None:
        model, bus = self.queue(queue), self.clients[0]
        if not model.dead:
            return
        letter = model.dead.pop(pick % len(model.dead))
        assert letter.id is not None, "it was listed after it died"
        await (bus.requeue if again else bus.drop)(queue, letter.id)
        if again:
            now = anyio.current_time()
            model.add(letter.event, now, now, late=letter.late)
        for call in (bus.requeue, bus.drop):
            with pytest.raises(NotFoundError):
                await call(queue, letter.id)

    # logs

    async def own(self, log: str, client: int) -> Owner:
        """Put the log back where it is retired, read it and take it over."""
        bus = self.clients[client]
        if self.log(log).retired:
            await self.restore(log, 0)
        events = await bus.read(log)
        box = await self._open.enter_async_context(bus.mailbox(log))
        seq = events[-1].seq if events else 0
        owner = Owner(bus, log, seq, box, {event.id for event in events})
        await self.record(owner, self.event(EpisodeTakenOver(worker=f"worker/{client}")))
        return owner

    async def record(self, owner: Owner, *events: Event) -> bool:
        """Append events and the mail that is read and not recorded; whether that was accepted."""
        acks = owner.unrecorded
        fresh = {mail.event.id: mail.event for mail in acks if mail.event.id not in owner.recorded}
        batch = [*events, *fresh.values()]
        accepted = await self.append(owner.bus, owner.log, owner.seq, batch, acks)
        if accepted:
            owner.last_append = (owner.seq, batch, acks)
            owner.seq += len(batch)
            owner.recorded |= {event.id for event in batch}
            owner.unrecorded = []
        return accepted

    async def append(
        self, bus: Bus, log: str, expected: int, events: Sequence[Event], acks: Sequence[Mail] = ()
    ) -> bool:
        model = self.log(log)
        letters = [letter for mail in acks if (letter := model.letter(mail))]
        accepted = model.append(expected, events, letters)
        with nullcontext() if accepted else pytest.raises(Fenced):
            last = await bus.append(log, expected, events, acks=acks)
            assert last == expected + len(events)
        return accepted

    async def unlink(self, log: str, keep_s: float, *, stale: bool) -> None:
        """When what is kept for a short time goes, a server alone knows."""
        model = self.log(log)
        keep_s = keep_s if self._exact or keep_s > DEADLINE_S else 0.0
        last = model.last + 1 if stale else None
        await self.clients[0].unlink(log, keep_s=keep_s, last=last)
        if not stale:
            model.unlink(anyio.current_time() + keep_s)

    async def fork(self, parent: str, log: str, back: int) -> None:
        at = self.log(parent).last - back
        if at > 0:
            batch = [self.event(EpisodeForked(parent=parent, at=at)), self.note("live")]
            await self.append(self.clients[1], log, at, batch)

    async def restore(self, log: str, missing: int) -> None:
        """From a store that lacks so many of the newest events."""
        model = self.log(log)
        stored = model.stored[: max(len(model.stored) - missing, 0)]
        model.restore(stored)
        await self.clients[1].restore(log, stored)

    async def restore_another(self, log: str) -> None:
        """Another history, which is longer."""
        model = self.log(log)
        end = model.last + 1 if model.last else 0
        events = [self.note("other").at(seq) for seq in range(model.first, end + 1)]
        await self.clients[0].restore(log, events)

    async def tail(self, log: str, start: int, client: int) -> None:
        expected = [event.id for event in self.log(log).events if event.seq >= start]
        async with self.clients[client].tail(log, start) as events:
            assert [(await soon(anext(events))).id for _ in expected] == expected

    # mail

    async def send_mail(self, log: str, *events: Event) -> None:
        await self._mailed(log, events, self.clients[1].send_mail(log, *events))

    async def reply_by_mail(self, episode_id: str) -> None:
        """What an episode asked for is answered to its log."""
        question = MessagePosted(content="question")
        request, answer = self.event(question, episode_id=episode_id), self.note("answer")
        replying = self.clients[0].reply(request, answer)
        await self._mailed(episode_log(episode_id), [answer], replying)

    async def _mailed(self, log: str, events: Sequence[Event], sending: Awaitable[None]) -> None:
        waiting = self.log(log).mail
        fullest = max(len(waiting[lane_of(event)]) for event in events)
        if await _accepts(MAIL_LIMIT, (fullest, fullest), sending):
            self.log(log).send(events)

    async def read_mail(self, owner: Owner) -> None:
        """What its mailbox has not given it yet, control mail first."""
        expected = [x for x in self.log(owner.log).waiting() if x not in owner.seen]
        while expected:
            mails = await soon(anext(owner.box))
            letters = expected[: len(mails)]
            del expected[: len(mails)]
            for mail, letter in zip(mails, letters, strict=True):
                letter.id = letter.id or mail.id
                assert mail.event.id == letter.event.id, "mail is missing, or out of order"
                assert mail.id == letter.id
            owner.seen += letters
            owner.unrecorded += mails
        if self._exact:
            await nothing_from(anext(owner.box))

    # calls and broadcasts

    async def request(self, queue: str, client: int, *, answers: int, timeout_s: float) -> None:
        """Somebody works for a caller that waits. The first answer counts; without one it waits until its deadline."""
        caller, other = self.clients[client], self.clients[1 - client]
        question, replies = self.note("question"), [self.note("answer") for _ in range(answers)]

        async def work() -> None:
            # Who doesn't answer may be too late even to begin.
            name, late = f"worker-{uuid4().hex[:8]}", not replies
            async with other.consume(queue, consumer=name, past_deadline=late) as consumer:
                delivery = await soon(consumer.take())
                assert delivery.event.id == question.id
                deadline = delivery.event.deadline
                assert deadline is not None
                assert deadline <= other.now() + timedelta(seconds=timeout_s + MILLISECOND_S)
                for reply in replies:
                    await other.reply(delivery.event, reply)
                await delivery.ack()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work)
            if replies:
                answer = await soon(caller.request(queue, question, timeout_s=timeout_s))
                assert answer.id == replies[0].id
            else:
                with pytest.raises(RequestTimeoutError):
                    await soon(caller.request(queue, question, timeout_s=timeout_s))

    async def broadcast(self, client: int, number: int) -> None:
        """Who listens hears all of it, and nothing else."""
        async with AsyncExitStack() as stack:
            listening = [
                await stack.enter_async_context(bus.listen(channel))
                for channel in ("other", "news", "news")
                for bus in self.clients
            ]
            for value in range(number):
                await self.clients[client].broadcast("news", value)
            await self.clients[client].broadcast("other", "last")
            for heard in listening[:2]:
                assert await soon(anext(heard)) == "last"
            for heard in listening[2:]:
                assert [await soon(anext(heard)) for _ in range(number)] == [*range(number)]

    # feed

    async def follow(self, processed: int, client: int) -> None:
        """All that the feed has after the cursor; then the follower dies, having seen to only so many entries."""
        places, found = dict(self._places), list[FeedEntry]()
        missing = sum(len(log.told) - places.get(name, 0) for name, log in self.logs.items())
        async with self.clients[client].feed(self._cursor) as feed:
            while missing > 0:
                for entry in await soon(anext(feed)):
                    found.append(entry)
                    missing -= 1
                    self._advance(places, entry)
                    self._told_last = entry.cursor
        for entry in found[:processed]:
            self._advance(self._places, entry)
            self._cursor = entry.cursor

    async def trim(self) -> None:
        """For somebody who is as far as the follower was, and somebody who has seen to all that it was told."""
        await self.clients[0].trim_feed(self._told_last, self._cursor)

    def _advance(self, places: dict[str, int], entry: FeedEntry) -> None:
        """It must be the next of its log."""
        told, place = self.logs[entry.log].told, places.get(entry.log, 0)
        next_one = told[place : place + 1]
        assert next_one == [(entry.first, entry.last)], f"{entry} came, not {next_one}"
        places[entry.log] = place + 1

    # what must be true

    async def check(self) -> None:
        for name in self.logs:
            await self._check_log(name)
        for name in self.queues:
            await self._check_dead(name)
            await self._check_backlog(name)

    async def _check_log(self, name: str) -> None:
        model, bus = self.log(name), self.clients[0]
        there = [(event.seq, event.id) for event in await bus.read(name)]
        assert there == [(event.seq, event.id) for event in model.events]
        assert await bus.last_seq(name) == model.last
        assert len({event.id for event in model.events}) == len(there), "an event is there twice"

    async def _check_dead(self, name: str) -> None:
        model, known = self.queue(name), {letter.id for letter in self.queue(name).dead}
        letters = await self.clients[1].dead_letters(name)
        assert known - {None} <= {letter.id for letter in letters}
        for letter in letters:
            if letter.id in known or letter.event is None:
                continue
            late = [w for w in model.work if w.late and w.event.id == letter.event.id]
            if late and letter.reason.startswith("deadline"):
                model.bury(late[0], letter.reason)
            new = [dead for dead in model.dead if dead.id is None and dead.late == bool(late)]
            assert new, f"{letter.event.source} is a dead letter: {letter.reason}"
            expected = new[0]
            expected.id = letter.id
            assert (expected.event.id, expected.reason) == (letter.event.id, letter.reason)
            assert not self._exact or letter.deliveries == expected.deliveries
        assert all(dead.id for dead in model.dead), "a dead letter is missing"

    async def _check_backlog(self, name: str) -> None:
        least, most = self._unsettled(name)
        assert least <= await self.clients[1].backlog(name) <= most

    def _unsettled(self, queue: str) -> tuple[int, int]:
        """How much work the queue has at least, and at most."""
        model = self.queue(queue)
        sure = sum(not (work.late or work.doubtful) for work in model.work)
        return len(model.work) if self._exact else sure, len(model.work)

    async def check_nothing_is_lost(self) -> None:
        """Everybody leaves; then all work that was not settled comes, and all mail that was not recorded."""
        for member in list(self._members):
            await self.leave(member)
        for name, model in self.queues.items():
            heir = await self.join(name, 3, 0)
            while model.sure(NEVER):
                soonest = min(work.until for work in model.sure(NEVER))
                await anyio.sleep(max(0.0, soonest - anyio.current_time()))
                if taken := await self.take(heir, 3):
                    await self.ack(*taken)
                else:
                    raise AssertionError(f"queue {name} gives nothing more")
        for name in self.logs:
            # Behind whatever was not freed.
            await self.send_mail(name, self.event(EpisodeCancelled(reason="end")), self.note("end"))
            owner = await self.own(name, 0)
            await self.read_mail(owner)
            recorded = await self.record(owner)
            assert recorded == (not self.log(name).retired), "who has just read it knows its end"
            assert not (recorded and self.log(name).waiting())
        await self.follow(0, 1)
        await self.check()
