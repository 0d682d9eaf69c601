"""Following streams: mailboxes and tails, all through one loop.

    hint ─▶ stale ─┐
    each second ─▶ stale ─┴─▶ run: one XREAD, of a slot's stale ones that somebody waits for ─▶ their entries

A stream is read only while its follower waits, so a slow one holds one batch and no more. One read of a
slot is under way at a time, and no slot waits for another's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

import anyio

from aworld_runtime.bus.redis.entries import Entry, entries, position
from aworld_runtime.bus.redis.hints import Hints
from aworld_runtime.bus.redis.link import Link
from aworld_runtime.bus.redis.wire import Reply

SWEEP_S = 1.0
"""How long something may stay unseen whose hint was lost."""
BATCH = 256


class Follower:
    """One reader's place in a stream, or in several of which an earlier one goes before a later one."""

    def __init__(self, cursors: dict[bytes, bytes], slot: int, follows: Follows) -> None:
        self.cursors = cursors
        self.slot = slot
        """All its streams are in one."""
        self.stale = True
        """There may be something to read."""
        self.waiter: asyncio.Future[tuple[bytes, list[Entry]]] | None = None
        self._follows = follows

    def ask(self) -> asyncio.Future[tuple[bytes, list[Entry]]]:
        """Will be done when `next` needn't wait."""
        if self.waiter is None:
            self.waiter = asyncio.get_running_loop().create_future()
            if self.stale:
                self._follows.wake(self.slot)
        return self.waiter

    async def next(self) -> tuple[bytes, list[Entry]]:
        """A stream and its entries after the last ones; waits for some."""
        try:
            key, found = await self.ask()
        finally:
            self.waiter = None
        # Only here: who is cancelled before gets them again.
        self.cursors[key] = found[-1][0]
        return key, found

    def take(self, found: Mapping[bytes, list[Entry]]) -> None:
        """Hand over what is new in the first stream that has something new."""
        for key, cursor in self.cursors.items():
            after = position(cursor)
            fresh = [entry for entry in found.get(key, ()) if position(entry[0]) > after]
            if fresh:
                self.stale = True  # there may be more
                if self.waiter is not None and not self.waiter.done():
                    self.waiter.set_result((key, fresh))
                return


class Follows:
    """All followers of a bus."""

    def __init__(self, link: Link, hints: Hints) -> None:
        self._link = link
        self._hints = hints
        self._followers: list[Follower] = []
        self._reading: set[int] = set()
        """Slots of which a read is under way."""
        self._again: set[int] = set()
        """Those of them to be looked at when it is over."""
        self._woken = asyncio.Event()

    @contextmanager
    def following(self, *keys: bytes, after: bytes = b"0-0") -> Generator[Follower]:
        """Follow streams of one slot; their keys are the channels of their hints."""
        follower = Follower(dict.fromkeys(keys, after), self._link.slot(keys[0]), self)

        def hear(_: bytes) -> None:
            follower.stale = True
            if follower.waiter is not None:
                self.wake(follower.slot)

        self._followers.append(follower)
        try:
            with ExitStack() as heard:
                for key in keys:
                    heard.enter_context(self._hints.hearing(key, hear))
                yield follower
        finally:
            self._followers.remove(follower)

    def wake(self, slot: int) -> None:
        """Look at what is stale."""
        if slot in self._reading:
            self._again.add(slot)
        else:
            self._woken.set()

    def suspect_all(self) -> None:
        """Hints may have been lost."""
        for follower in self._followers:
            follower.stale = True
        self._again |= self._reading
        self._woken.set()

    async def run(self) -> None:
        """Serve the followers until cancelled."""
        next_sweep = anyio.current_time() + SWEEP_S
        while True:
            with anyio.move_on_at(next_sweep):
                await self._woken.wait()
            self._woken.clear()
            if anyio.current_time() >= next_sweep:
                next_sweep = anyio.current_time() + SWEEP_S
                self.suspect_all()
            hungry: dict[int, list[Follower]] = {}
            for follower in self._followers:
                if follower.stale and follower.waiter and follower.slot not in self._reading:
                    hungry.setdefault(follower.slot, []).append(follower)
            for followers in hungry.values():
                self._read(followers)

    def _read(self, hungry: list[Follower]) -> None:
        """Ask for what is new to followers of one slot."""
        cursors: dict[bytes, bytes] = {}
        for follower in hungry:
            follower.stale = False
            for key, cursor in follower.cursors.items():
                cursors[key] = min(cursor, cursors.get(key, cursor), key=position)
        head = (b"XREAD", b"COUNT", str(BATCH), b"STREAMS")
        reply = self._link.call(*head, *cursors, *cursors.values(), key=next(iter(cursors)))
        self._reading.add(hungry[0].slot)
        reply.add_done_callback(partial(self._feed, hungry))

    def _feed(self, hungry: list[Follower], reply: asyncio.Future[Reply]) -> None:
        """Hand out what was read."""
        slot = hungry[0].slot
        self._reading.discard(slot)
        if slot in self._again:
            self._again.discard(slot)
            self._woken.set()
        if error := reply.exception():
            for follower in hungry:
                if follower.waiter is not None and not follower.waiter.done():
                    follower.waiter.set_exception(error)
                follower.stale = True
            return
        found = {key: entries(page) for key, page in reply.result() or ()}
        for follower in hungry:
            follower.take(found)
