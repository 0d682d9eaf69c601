"""The event bus, as every backend keeps it.

    logs        ordered, gapless, append-only; one owner each, fenced by the expected seq of its append. An ended one is
                retired to its last event; one that the server lost is restored
    mail        what others send to a log's owner; enters the log in the append that acknowledges it. It comes in two lanes:
                control mail (`EventData.control`: cancel, pause) passes all other mail, and all other calls of its sender
    queues      work for a role: competing consumers, leases kept alive while the work goes on, retry, dead letter; requests
                are work whose sender waits for the reply
    feed        (log, first, last) of every append, for archivers and subscribers
    broadcasts  lossy: token deltas, wake-ups
    nodes       who is on the bus now, as they say themselves

What it holds is bounded (`BusFullError`).

A backend is chosen by URL (`open_bus`) and passes tests/contracts/test_bus.py. External effects are at-least-once;
what is committed to a log is there exactly once. What is promised, and what isn't: docs/delivery.md.
"""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from secrets import token_hex
from typing import Literal, Protocol, Self, TypeAlias

import anyio
from pydantic import JsonValue

from aworld_runtime.errors import (
    AccessDeniedError,
    BusError,
    BusFullError,
    EventsMissedError,
    MissingParentError,
)
from aworld_runtime.events import EpisodeForked, Event
from aworld_runtime.messages import Data

LEASE_S = 2.0
"""Seconds after the last sign of life at which a delivery goes to another consumer."""
MAX_DELIVERIES = 3
"""Failed tries after which a delivery goes to the dead letters."""
DEAD_MAIL = "mail"
"""The queue whose dead letters are mail that could not be read, or that its owner refused."""
Lane: TypeAlias = Literal["control", "data"]
"""One of the two streams of a log's mail."""
PAGE = 10_000
"""Events of a log that are read at once."""
RETIRED_S = 24 * 3600.0
"""Life of the last event of a log that was unlinked."""
ANNOUNCE_EVERY_S = 1.0
"""Seconds between two words of a node."""
READER_BELIEVED_S = 60.0
"""After its last word, what an archiver or a subscription has not read of the feed is kept for it."""
LEAVE_S = 2.0
"""Seconds that a node takes at most to say that it is gone."""

Standing = Literal["held", "taken", "gone"]
"""Of a delivery, at the server: still its consumer's; another's, or free for another; or the queue knows nothing
of it, because it was settled, or because the server lost it."""


class NodeInfo(Data):
    """A node that is on the bus now."""

    name: str
    """`role/instance`. Processes that were given the same name are listed each by itself."""
    kind: str
    """worker, tool, environment, trainer, sampler, archiver, janitor, subscriber, agent or launcher."""
    version: str = ""
    url: str | None = None
    pid: int = 0
    host: str = ""
    load: float = 0.0
    """Fraction of its slots in use."""
    queues: tuple[str, ...] = ()
    """Queues it takes work from: its lag is their backlog."""
    behind_s: float | None = None
    """Age of the oldest event that it has not yet seen to; none where it follows nothing."""
    since: datetime | None = None
    seen: datetime | None = None
    """When it last announced itself; the bus writes it down, by its own clock."""
    detail: dict[str, JsonValue] = {}

    @property
    def role(self) -> str:
        return self.name.partition("/")[0]


@dataclass(frozen=True, slots=True)
class FeedEntry:
    """One append: events `first` … `last` of `log` are readable. `cursor` resumes the feed after it."""

    cursor: str
    log: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """An event that its queue gave up on."""

    id: str
    queue: str
    event: Event | None
    """None where the bytes could not be decoded; `raw` holds them."""
    reason: str
    deliveries: int
    time: datetime
    """When that was."""
    raw: bytes = b""
    log: str | None = None
    """Whose mail it was; None for work of a queue."""


class Delivery(Protocol):
    """One event as a consumer received it; it has no seq.

    Its lease is renewed until it is settled or its consumer closes.
    """

    @property
    def event(self) -> Event: ...
    @property
    def queue(self) -> str: ...
    @property
    def count(self) -> int:
        """How often it has been delivered, this time included; a takeover after a lost lease doesn't count as failure."""
        ...

    @property
    def lost(self) -> bool:
        """Its lease has gone to somebody else: drop the work. To retry or give up has no effect then."""
        ...

    async def standing(self) -> Standing:
        """Ask the server whose it is: `lost` knows it only a moment later, and not why."""
        ...

    async def ack(self) -> None:
        """Done; it is never delivered again."""
        ...

    async def retry(self, after_s: float | None, reason: str) -> bool:
        """It failed: deliver it again after `after_s` seconds, None for a wait that doubles with each failure (`backoff_s`).

        The third failure is a dead letter with this reason; then the answer is False: it doesn't come again.
        """
        ...

    async def dead_letter(self, reason: str) -> None:
        """Give up on it now."""
        ...


class Consumer(Protocol):
    """A place in a queue's consumer group."""

    async def take(self) -> Delivery:
        """The next delivery; waits for one. Safe to cancel: nothing is stranded.

        Undecodable events, and those whose deadline has passed, never arrive here: they go to the dead letters.
        """
        ...

    async def take_many(self, at_most: int) -> Sequence[Delivery]:
        """As `take`, with what else is there, oldest first; never more than its credit leaves.

        Work that a consumer gave back or lost stands where it stood: who joins after that gets it before younger work.
        A retry stands at the end.
        """
        ...

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Settle several of this consumer's deliveries as done, at the cost of one."""
        ...

    def abandon(self) -> None:
        """Stop renewing leases without settling anything, as when the process dies. For fault injection."""
        ...


@dataclass(frozen=True, slots=True)
class Mail:
    """An event sent to a log's owner; it has no seq yet.

    Pass it to `append(..., acks=...)` with the events that record it.
    """

    id: str
    log: str
    event: Event

    @property
    def lane(self) -> Lane:
        return lane_of(self.event)


class Mailbox(Protocol):
    """A log's mail, for its owner: all that is unacknowledged, then new mail as it comes; each mail once per mailbox.

    Close it, or use it in `async with`.
    """

    def __aiter__(self) -> Self: ...
    async def __anext__(self) -> list[Mail]: ...

    def call_when_mail(self, tell: Callable[[], None]) -> None:
        """Have `tell` called, once, when there may be mail: for who would keep a task only to wait for it. Where there is some
        that is soon, but not before this returns. It may be called though the mailbox is closed by then.
        """
        ...

    def close(self) -> None: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *exc: object) -> None: ...


def lane_of(event: Event) -> Lane:
    """Where it stands as mail."""
    return "control" if event.data.control else "data"


def due_within(event: Event, seconds: float, now: datetime) -> Event:
    """`event` with a deadline so soon, unless its own is sooner."""
    deadline = now + timedelta(seconds=seconds)
    if event.deadline is not None and _aware(event.deadline) <= deadline:
        return event
    return event.model_copy(update={"deadline": deadline})


def too_late(event: Event, now: Callable[[], datetime]) -> str | None:
    """Why nobody need work on it any more; None while somebody may wait for it."""
    if event.deadline is None:  # most have none, and a clock costs something
        return None
    deadline = _aware(event.deadline)
    return f"deadline {deadline.isoformat()} has passed" if deadline <= now() else None


def _aware(moment: datetime) -> datetime:
    """Without a time zone it is UTC."""
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def refusal(log: str, expected_seq: int, last: int) -> str:
    """Why an append is fenced."""
    if last == 0:
        return (
            f"append to log {log!r} after seq {expected_seq} refused: the log is empty. Either it never had an"
            " owner who wrote so much, or the server lost it: restore it from the store, or fail the episode"
        )
    if last == expected_seq:
        return (
            f"append to log {log!r} after seq {expected_seq} refused: the log has ended and is retired; drop the work,"
            " or put the log back from the store first"
        )
    return (
        f"append to log {log!r} after seq {expected_seq} refused: its last seq is {last}, so another owner"
        " appended; drop the work"
    )


class Bus(Protocol):
    """See the module docstring. All methods raise `BusUnavailableError` when the server stays away past a deadline.

    Iterators (tail, feed, mailbox, listen) wait for more. Whoever cancels such a wait loses nothing and may go on.
    """

    url: str
    """Without the password: it may be shown."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *exc: object) -> None: ...

    def now(self) -> datetime:
        """The time by the clock that all clients of this bus share. Deadlines are judged by it, so set them by it."""
        ...

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
        """Add `events` after `expected_seq` and acknowledge mail, in one atomic step; returns the last seq.

        Appending the very same events at the same place again is success (the reply was lost). An empty log accepts
        `expected_seq` > 0 only for a batch that begins with `episode.forked`, or from `restore`. To begin a log only where
        nobody can have written to it, give the `feed_id` of before it was seen to be empty.

        Raises:
            Fenced: the log's last seq is not `expected_seq`: somebody else owns it. Or it is retired; or the server has lost
                its data since the log's feed was `feed_id`.
            BusFullError: the server refuses new events.
            PayloadTooLargeError: an event above the cap.
        """
        ...

    async def read(self, log: str, start: int = 1, *, limit: int = 10_000) -> list[Event]:
        """Events `start` … of the log, at most `limit`."""
        ...

    async def last_seq(self, log: str) -> int:
        """Seq of the last event; 0 for an empty log."""
        ...

    def tail(self, log: str, start: int = 1) -> AbstractAsyncContextManager[AsyncIterator[Event]]:
        """The log's events from `start`, then each new one as it is appended. Never ends by itself."""
        ...

    async def restore(self, log: str, events: Sequence[Event]) -> None:
        """Put a log back that the server lost, from the store or by its owner; the feed tells of it.

        Does nothing where the log is not empty, unless it is retired: `events` that end with its last event replace it.
        """
        ...

    async def unlink(self, log: str, *, keep_s: float = RETIRED_S, last: int | None = None) -> None:
        """Retire a log: free its events and mail. For the janitor, once it is finished and archived. Does nothing where
        its last seq is no longer `last`, if that is given.

        Its last event stays for `keep_s` seconds, whatever it is: `last_seq` stays right, and a late owner is refused
        whatever seq it expects, instead of beginning the log anew: `restore` is the way back. `read` and `tail` give
        what is there. Of an empty log only mail is freed.
        """
        ...

    async def server_id(self) -> str:
        """Who keeps the events: another after a restart, a failover or a flush, which may have lost the newest or all."""
        ...

    # feed
    async def feed_id(self, log: str | None = None) -> str:
        """The same for every client, as long as the feed's data lives; another feed has another. With `log`, of the part of the
        feed that tells of this log: on a cluster each node has one.

        Who keeps a cursor names it by this: tomorrow the same URL may lead to another feed.
        """
        ...

    def feed(self, after: str = "0") -> AbstractAsyncContextManager[AsyncIterator[list[FeedEntry]]]:
        """Every append after the cursor, the oldest of each log first, in batches; waits for more. At least once."""
        ...

    async def trim_feed(self, *before: str) -> None:
        """Forget entries before the first of these cursors: those of everyone who follows the feed."""
        ...

    def subscribe(self, *types: str, after: str = "0") -> Subscription:
        """Events of every log whose type begins with one of `types` (`tool.` or `tool.*`; none: all), from the feed's cursor on.

        `async for` it. Each log's events come in order, at least once; `cursor` is where to resume.
        """
        ...

    # mail
    async def send_mail(self, log: str, *events: Event) -> None:
        """Give events to the log's owner, all or none. The same event id may arrive twice; the owner dedupes.

        Raises:
            QueueFullError: so much mail waits there that no more is taken; retry later.
        """
        ...

    def mailbox(self, log: str, lane: Lane | None = None) -> Mailbox:
        """Open the mail of a log that the caller owns.

        Of both lanes, control mail is what comes next, however much of the other waits. An owner that may be held up by
        data opens a mailbox for each.
        """
        ...

    async def bury_mail(self, mail: Mail, reason: str) -> None:
        """Give up on mail, for the log's owner: it goes to the dead letters of `DEAD_MAIL`."""
        ...

    # queues
    async def put(self, queue: str, *events: Event, at: datetime | None = None) -> None:
        """Add work to a queue, all or none; at `at` if given (delayed events).

        Raises:
            QueueFullError: so much is unsettled there that no more is taken; retry later.
        """
        ...

    def consume(
        self,
        queue: str,
        *,
        consumer: str,
        credit: int = 1,
        lease_s: float = LEASE_S,
        past_deadline: bool = False,
    ) -> AbstractAsyncContextManager[Consumer]:
        """Join the queue's consumer group. At most `credit` unsettled deliveries are held at once.

        `consumer` is a name for people: what one holds isn't another's, whatever it is called.
        With `past_deadline` it also gets what is too late: for who has to tell somebody of that.
        """
        ...

    async def backlog(self, queue: str) -> int:
        """Events in the queue that nobody has settled yet, those that wait for their time included."""
        ...

    async def dead_letter_queues(self) -> list[str]:
        """The queues that have dead letters; among them `DEAD_MAIL` where mail could not be read."""
        ...

    async def dead_letters(self, queue: str, *, limit: int = 10_000) -> list[DeadLetter]:
        """What the queue gave up on, oldest first."""
        ...

    async def requeue(self, queue: str, dead_letter_id: str) -> None:
        """Put a dead letter's event back on its queue, with all its tries again; mail, into its log's mail.

        Raises:
            NotFoundError: no such dead letter.
        """
        ...

    async def drop(self, queue: str, dead_letter_id: str) -> None:
        """Forget a dead letter.

        Raises:
            NotFoundError: no such dead letter.
        """
        ...

    async def request(self, queue: str, event: Event, *, timeout_s: float) -> Event:
        """Put `event` on a queue and wait for its reply (whoever handles it calls `reply`). Its deadline is the end of the
        wait, or its own where that is sooner.

        Raises:
            RequestTimeoutError: no reply in time.
        """
        ...

    async def reply(self, request: Event, answer: Event) -> None:
        """Answer a request: by mail to `episode_log` of its episode, else to the caller that waits."""
        ...

    # broadcasts
    async def broadcast(self, channel: str, value: JsonValue) -> None:
        """Tell everyone who listens now. Lossy: nobody waits for a listener that is slow, or a server that is away."""
        ...

    def listen(self, channel: str) -> AbstractAsyncContextManager[AsyncIterator[JsonValue]]: ...

    # membership
    async def announce(self, node: NodeInfo, *, ttl_s: float = 5.0) -> None:
        """Say that a node is here; say it again before `ttl_s` runs out."""
        ...

    async def withdraw(self, name: str) -> None:
        """Say that a node that was announced over this bus is gone."""
        ...

    async def nodes(self) -> list[NodeInfo]: ...


@dataclass
class Subscription:
    """Events of all logs whose type begins with one of `prefixes` (empty: all), in each log's order.

    While it is iterated over it is a node on the bus that says how far it is: what it hasn't read yet of the feed stays there.

    Raises:
        EventsMissedError: it was so slow that a log has ended and is retired since.
    """

    bus: Bus
    prefixes: tuple[str, ...] = ()
    after: str = "0"
    cursor: str = field(init=False)
    """Resume here after a restart."""
    _next_word: float = field(init=False, default=0.0, repr=False)

    def __post_init__(self) -> None:
        self.cursor = self.after
        self.prefixes = tuple(prefix.removesuffix("*") for prefix in self.prefixes)

    async def __aiter__(self) -> AsyncGenerator[Event]:
        began = self.bus.now()
        node = NodeInfo(
            name=f"subscriber/{socket.gethostname()}-{os.getpid()}-{token_hex(3)}",
            kind="subscriber",
            pid=os.getpid(),
            host=socket.gethostname(),
            since=began,
            detail={"types": list(self.prefixes), "feed": await self.bus.feed_id()},
        )
        try:
            async with self.bus.feed(self.after) as entries:
                while True:
                    await self._say(node)
                    batch: list[FeedEntry] = []
                    with anyio.move_on_after(ANNOUNCE_EVERY_S):
                        batch = await anext(entries)
                    for entry in batch:
                        for event in await self._read(entry, began):
                            if not self.prefixes or event.type.startswith(self.prefixes):
                                yield event
                        self.cursor = entry.cursor
                        await self._say(node)
        finally:
            with anyio.move_on_after(LEAVE_S, shield=True), suppress(BusError):
                await self.bus.withdraw(node.name)

    async def _say(self, node: NodeInfo) -> None:
        """Where it is, where it is time to."""
        if anyio.current_time() < self._next_word:
            return
        self._next_word = anyio.current_time() + ANNOUNCE_EVERY_S
        detail = {**node.detail, "cursor": self.cursor}
        with suppress(AccessDeniedError, BusFullError):  # who may only look isn't waited for
            await self.bus.announce(
                node.model_copy(update={"detail": detail}), ttl_s=READER_BELIEVED_S
            )

    async def _read(self, entry: FeedEntry, began: datetime) -> list[Event]:
        events = await self.bus.read(entry.log, entry.first, limit=entry.last - entry.first + 1)
        if events and events[0].seq > entry.first and events[-1].time > began:
            raise EventsMissedError(
                f"the subscription is too slow: {entry.log} has ended, and its events {entry.first} to"
                f" {events[0].seq - 1} are no longer on the bus; the store has them. Go on after its `cursor`"
            )
        return events


class Readable(Protocol):
    """Where logs are: a bus, a store, or both."""

    async def read(self, log: str, start: int = 1, *, limit: int = 10_000) -> list[Event]: ...


async def read_own(where: Readable, log: str, start: int = 1) -> list[Event]:
    """What the log itself holds from `start` on, however long, in pages."""
    events: list[Event] = []
    while page := await where.read(log, start):
        events += page
        start = page[-1].seq + 1  # not a count: a fork's log begins in the middle
    return events


async def read_all(
    where: Readable, log: str, start: int = 1, *, last: int | None = None
) -> list[Event]:
    """Events `start` … `last` of the log's history: before what a fork's log holds come its parent's events.

    Raises:
        MissingParentError: these are not all there.
    """
    events: list[Event] = []
    while last is None or start <= last:
        limit = PAGE if last is None else min(PAGE, last - start + 1)
        page = await where.read(log, start, limit=limit)
        if not page:
            break
        if not events:
            events = await read_shared(where, page[0], start, last=last)
        events += page if last is None else (event for event in page if event.seq <= last)
        start = page[-1].seq + 1
    return events


async def read_shared(
    where: Readable, first: Event, start: int = 1, *, last: int | None = None
) -> list[Event]:
    """Events `start` … `last` of a log's history that are not in the log itself, which begins with `first`: those that a fork
    shares with its parent. None where it is no fork, or holds copies of them.

    Raises:
        MissingParentError: these are not all there.
    """
    if not isinstance(first.data, EpisodeForked) or first.seq <= start:
        return []
    parent, at = first.data.parent, first.data.at
    last = at if last is None else min(last, at)
    shared = await read_all(where, parent, start, last=last)
    if len(shared) != last - start + 1:
        raise MissingParentError(
            f"episode {first.episode_id} was forked from log {parent} after event {at}, and of its events {start} to"
            f" {last} only {len(shared)} are there: name the bus or the store that holds the log it was forked from"
        )
    return shared
