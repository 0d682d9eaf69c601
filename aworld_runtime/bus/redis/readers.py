"""What the callers of `tail` and `mailbox` iterate over. A cancelled wait loses nothing."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Self

from aworld_runtime.bus.base import Mail
from aworld_runtime.bus.redis.entries import Entry, Kept, unpacked
from aworld_runtime.bus.redis.follow import Follower
from aworld_runtime.errors import EventError
from aworld_runtime.events import Event

logger = logging.getLogger(__name__)


class Tail:
    """Iterates over a log; waits at its end."""

    def __init__(
        self,
        follower: Follower,
        log: str,
        start: int,
        decode: Callable[[str, Sequence[Kept]], Awaitable[Sequence[Event]]],
    ) -> None:
        self._follower = follower
        self._log = log
        self._start = start
        self._decode = decode
        self._entries: deque[Entry] = deque()
        self._read: deque[Kept] = deque()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while not self._read:
            if not self._entries:
                _, entries = await self._follower.next()
                self._entries.extend(entries)
            kept = unpacked(self._log, self._entries.popleft())
            self._read.extend(one for one in kept if one.seq >= self._start)
        try:
            (event,) = await self._decode(self._log, [self._read[0]])
        except EventError:
            self._read.popleft()
            raise
        self._read.popleft()
        return event


class Mailbox:
    """Implements `Mailbox` of the contract: the mail of the first stream first."""

    def __init__(
        self,
        following: AbstractContextManager[Follower],
        log: str,
        decode: Callable[[bytes, str], Event],
        bury: Callable[[bytes, Entry, str], Awaitable[None]],
    ) -> None:
        self._open = ExitStack()
        self._follower = self._open.enter_context(following)
        self._log = log
        self._decode = decode
        self._bury = bury
        self._read: tuple[bytes, list[Entry]] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Mail]:
        while True:
            found: list[Mail] = []
            unreadable: list[tuple[Entry, EventError]] = []
            self._read = self._read or await self._follower.next()
            stream, entries = self._read
            for entry in entries:
                try:
                    found.append(
                        Mail(entry[0].decode(), self._log, self._decode(entry[1][1], self._log))
                    )
                except EventError as error:
                    unreadable.append((entry, error))
            for entry, error in unreadable:
                reason = f"{type(error).__name__}: {error} (mail to {self._log})"
                await self._bury(stream, entry, reason)
            self._read = None
            if found:
                return found

    def call_when_mail(self, tell: Callable[[], None]) -> None:
        if self._read:
            asyncio.get_running_loop().call_soon(tell)
        else:
            self._follower.ask().add_done_callback(lambda _: tell())

    def close(self) -> None:
        self._open.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()
