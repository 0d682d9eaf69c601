"""Logs with their mail, the feed of all appends, and the iterators over them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Self

from anyio.lowlevel import checkpoint

from aworld_runtime.bus.base import FeedEntry, Lane, Mail
from aworld_runtime.bus.memory.signal import Signal
from aworld_runtime.events import EpisodeForked, Event, new_id

BATCH = 1000
"""Most feed entries handed over at once."""
YIELD_EVERY = 16
"""Events after which a reader that needn't wait lets other tasks run."""


class Log:
    """Events `base` + 1 … `last`, and the unacknowledged mail for their owner, oldest first in each lane."""

    __slots__ = ("appended", "base", "events", "mail", "mailed", "retired_until", "watchers")

    def __init__(self) -> None:
        self.base = 0
        self.events: list[Event] = []
        self.mail: dict[Lane, dict[int, Mail]] = {"control": {}, "data": {}}
        self.appended = Signal()
        self.mailed = Signal()
        self.watchers = 0
        self.retired_until: float | None = None
        """When the last event, kept of a log that was unlinked, goes too."""

    @property
    def last(self) -> int:
        return self.base + len(self.events)

    def takes(self, expected_seq: int, events: Sequence[Event]) -> bool:
        """Whether they may come next. A retired log takes none; an empty one begins in the middle where a fork does."""
        if expected_seq == self.last:
            return self.retired_until is None
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

    def retire(self, until: float) -> None:
        """Keep the last event alone, until then."""
        self.base, self.events = self.last - 1, self.events[-1:]
        self.retired_until = until

    def forget_events(self) -> None:
        self.base = 0
        self.events = []
        self.retired_until = None

    def forget_mail(self) -> None:
        for waiting in self.mail.values():
            waiting.clear()

    def add_mail(self, number: int, mail: Mail) -> None:
        self.mail[mail.lane][number] = mail
        self.mailed.notify_all()

    def acknowledge(self, mail: Mail) -> None:
        self.mail[mail.lane].pop(int(mail.id), None)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to keep it for."""
        return not (self.watchers or self.last or any(self.mail.values()))


class Tail:
    """Iterates over a log; waits at its end."""

    def __init__(self, log: Log, start: int) -> None:
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
        event = log.events[max(self._next - log.base - 1, 0)]
        self._next = event.seq + 1
        return event


class Mailbox:
    """Implements `Mailbox` of the contract: the mail of the first of `lanes` first. `closed` is called when it is."""

    __slots__ = ("_closed", "_lanes", "_log", "_seen")

    def __init__(self, log: Log, lanes: Sequence[Lane], closed: Callable[[], None]) -> None:
        self._log = log
        self._lanes = lanes
        self._closed: Callable[[], None] | None = closed
        self._seen: dict[Lane, int] = {}

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Mail]:
        await checkpoint()
        while not (fresh := self._fresh()):
            await self._log.mailed.wait()
        self._seen[fresh[0].lane] = int(fresh[-1].id)
        return fresh

    def call_when_mail(self, tell: Callable[[], None]) -> None:
        if self._fresh():
            asyncio.get_running_loop().call_soon(tell)
        else:
            self._log.mailed.call(tell)

    def close(self) -> None:
        if self._closed is not None:
            self._closed()
            self._closed = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def _fresh(self) -> list[Mail]:
        """The mail of the first lane that has new mail."""
        for lane in self._lanes:
            waiting = self._log.mail[lane]
            seen = self._seen.get(lane, 0)
            fresh = [waiting[n] for n in takewhile(seen.__lt__, reversed(waiting))]
            if fresh:
                return fresh[::-1]
        return []


class Feed:
    """Every append since the last trim.

    A cursor names its feed too: one of another feed reads from the beginning here, instead of skipping
    what that feed never had.
    """

    def __init__(self) -> None:
        self.id = new_id()
        self._entries: list[tuple[str, int, int]] = []
        self._trimmed = 0
        self.added = Signal()

    def add(self, log: str, first: int, last: int) -> None:
        self._entries.append((log, first, last))
        self.added.notify_all()

    def position(self, cursor: str) -> int:
        """How many entries there were up to the cursor's, that one included."""
        feed_id, _, position = cursor.partition("/")
        return int(position) if feed_id == self.id else 0

    def after(self, position: int) -> list[FeedEntry]:
        """The entries after `position`, at most a batch."""
        skip = max(position - self._trimmed, 0)
        return [
            FeedEntry(f"{self.id}/{number}", *entry)
            for number, entry in enumerate(
                self._entries[skip : skip + BATCH], self._trimmed + skip + 1
            )
        ]

    def first(self, cursors: Sequence[str]) -> int:
        """The position of the cursor that lies first."""
        return min(self.position(cursor) for cursor in cursors)

    def trim(self, upto: int) -> None:
        """Forget entries up to that position."""
        gone = min(max(upto - self._trimmed, 0), len(self._entries))
        del self._entries[:gone]
        self._trimmed += gone


class FeedReader:
    """Iterates over a feed in batches; waits at its end."""

    def __init__(self, feed: Feed, position: int) -> None:
        self._feed = feed
        self._position = position

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[FeedEntry]:
        await checkpoint()
        while not (entries := self._feed.after(self._position)):
            await self._feed.added.wait()
        self._position = self._feed.position(entries[-1].cursor)
        return entries
