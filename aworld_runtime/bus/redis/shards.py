"""Reading the feed of a cluster: one stream for each shard of the logs, from a cursor that names a place in each.

    a hint that a log of the shard grew ─▶ stale ─┐
    each second ─▶ all stale ─────────────────────┴─▶ an XREAD for each ─▶ pages ─▶ the next batch

A log stays in its shard, so its appends come in order. A shard whose node is away holds up no other.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Self

import anyio

from aworld_runtime.bus.base import FeedEntry
from aworld_runtime.bus.redis.entries import Entry, entries, position
from aworld_runtime.bus.redis.keys import Keys
from aworld_runtime.bus.redis.link import CommandRefused, Link
from aworld_runtime.bus.redis.wire import Reply
from aworld_runtime.errors import BusError

logger = logging.getLogger(__name__)

SWEEP_S = 1.0
"""How long an append may stay unseen whose hint was lost."""
PAGE = 256
BATCH = 1000
"""A batch is handed out when it is so large, or when there is no more."""
BEGINNING = b"0"


def read_cursor(cursor: str, shards: int) -> list[bytes]:
    """The place in each shard's feed; "0" is the beginning of all.

    Raises:
        BusError: it isn't a cursor of such a feed.
    """
    if cursor == "0":
        return [BEGINNING] * shards
    places = cursor.split(",")
    if len(places) != shards or not cursor.replace(",", "").replace("-", "").isdecimal():
        raise BusError(f"feed after {cursor!r}: no cursor of a feed of {shards} shards")
    return [place.encode() or BEGINNING for place in places]


class ShardedFeedReader:
    """Iterates over the feed in batches; waits at its end.

    Where a node came back empty, its shards' cursors lie ahead of everything: then those begin anew.
    """

    def __init__(self, link: Link, keys: Keys, after: str) -> None:
        self._link = link
        self._shard_of = keys.shard_of
        self._feeds = keys.feeds
        self._cursors = read_cursor(after, keys.shards)
        self._stale = set(range(keys.shards))
        """Shards that may have something to read."""
        self._reading: set[int] = set()
        """Shards that have been asked, or whose page has not been handed out."""
        self._pages: dict[int, list[Entry]] = {}
        self._error: BaseException | None = None
        self._changed = asyncio.Event()
        self._next_sweep = 0.0

    def hear(self, channel: bytes) -> None:
        """A log grew."""
        self._stale.add(self._shard_of(channel))
        self._changed.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[FeedEntry]:
        while True:
            self._changed.clear()
            self._sweep()
            for shard in self._stale - self._reading:
                self._ask(shard)
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self._pages:
                return self._hand_out()
            with anyio.move_on_at(self._next_sweep):
                await self._changed.wait()

    def _sweep(self) -> None:
        now = anyio.current_time()
        if now < self._next_sweep:
            return
        self._next_sweep = now + SWEEP_S
        for shard, cursor in enumerate(self._cursors):
            self._stale.add(shard)
            if cursor != BEGINNING and shard not in self._reading:
                facts = self._link.call(
                    b"XINFO", b"STREAM", self._feeds[shard], key=self._feeds[shard]
                )
                facts.add_done_callback(partial(self._begin_anew_if_lost, shard))

    def _ask(self, shard: int) -> None:
        self._stale.discard(shard)
        self._reading.add(shard)
        feed = self._feeds[shard]
        head = (b"XREAD", b"COUNT", str(PAGE), b"STREAMS")
        page = self._link.call(*head, feed, self._cursors[shard], key=feed)
        page.add_done_callback(partial(self._receive, shard))

    def _receive(self, shard: int, reply: asyncio.Future[Reply]) -> None:
        if error := reply.exception():
            self._reading.discard(shard)
            self._error = error
        elif page := reply.result():
            self._pages[shard] = entries(page[0][1])
        else:
            self._reading.discard(shard)
        self._changed.set()

    def _hand_out(self) -> list[FeedEntry]:
        found: list[FeedEntry] = []
        while self._pages and len(found) < BATCH:
            shard, page = self._pages.popitem()
            before = "".join(f"{_short(place)}," for place in self._cursors[:shard])
            after = "".join(f",{_short(place)}" for place in self._cursors[shard + 1 :])
            for entry_id, fields in page:
                first, last, log = fields[1].decode().split(" ", 2)
                cursor = f"{before}{_short(entry_id)}{after}"
                found.append(FeedEntry(cursor, log, int(first), int(last)))
            self._cursors[shard] = page[-1][0]
            self._reading.discard(shard)
            if len(page) == PAGE:
                self._stale.add(shard)
        return found

    def _begin_anew_if_lost(self, shard: int, reply: asyncio.Future[Reply]) -> None:
        error = reply.exception()
        if error is not None and not (
            isinstance(error, CommandRefused) and "no such key" in str(error)
        ):
            return  # the XREAD beside it fails too
        facts: list[bytes] = reply.result() if error is None else []
        last = facts[facts.index(b"last-generated-id") + 1] if facts else b"0-0"
        cursor = self._cursors[shard]
        if position(cursor) > position(last):
            logger.warning(
                "shard %d of the feed ends at %s, before the cursor %s: its node lost data; reading it"
                " from its beginning",
                shard,
                last.decode(),
                cursor.decode(),
            )
            self._cursors[shard] = BEGINNING
            self._stale.add(shard)
            self._changed.set()


def _short(place: bytes) -> str:
    """In a cursor: a beginning is left empty, and `-0` is left out."""
    return "" if place == BEGINNING else place.decode().removesuffix("-0")
