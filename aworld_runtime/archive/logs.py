"""Logs wherever they are: on the bus while it has them, in the store after that.

The bus keeps the last event of a log that it has let go.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Protocol, TypeVar

import anyio

from aworld_runtime.bus.base import Bus, Readable, read_all, read_shared
from aworld_runtime.errors import StoreUnavailableError
from aworld_runtime.events import Event
from aworld_runtime.store.base import Store
from aworld_runtime.store.open import open_store

logger = logging.getLogger(__name__)

PAGE = 1000
RETRY_S = 1.0

T = TypeVar("T")


class Kept(Readable, Protocol):
    """What is asked of a store here."""

    async def last_seq(self, log: str) -> int: ...


class Patient:
    """A store that is waited for while it is away: for who can do nothing without it, and isn't in a hurry."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def read(self, log: str, start: int = 1, *, limit: int = 10_000) -> list[Event]:
        return await self._wait(partial(self._store.read, log, start, limit=limit))

    async def last_seq(self, log: str) -> int:
        return await self._wait(partial(self._store.last_seq, log))

    async def _wait(self, ask: Callable[[], Awaitable[T]]) -> T:
        told = False
        while True:
            try:
                return await ask()
            except StoreUnavailableError as error:
                if not told:
                    told = True
                    logger.warning("waiting for the store: %s", error)
            await anyio.sleep(RETRY_S)


class OpenedToRead:
    """A store that is open for as long as it is read, which is seldom: one that is away stops no training."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def read(self, log: str, start: int = 1, *, limit: int = 10_000) -> list[Event]:
        async with open_store(self._url) as store:
            return await store.read(log, start, limit=limit)

    async def last_seq(self, log: str) -> int:
        async with open_store(self._url) as store:
            return await store.last_seq(log)


class Logs:
    """Reads logs; writes nothing."""

    def __init__(self, bus: Bus, store: Kept) -> None:
        self._bus = bus
        self._store = store

    async def read(self, log: str, start: int = 1, *, limit: int = 10_000) -> list[Event]:
        """Events `start` … of the log, at most `limit`."""
        events = await self._bus.read(log, start, limit=limit)
        if events[0].seq <= max(start, 1) if events else await self._bus.last_seq(log):
            return events
        # The bus has let it go but for its last event, or all of it; or it is a fork, which begins in the middle.
        stored = await self._store.read(log, start, limit=limit)
        return stored if stored and (not events or stored[0].seq < events[0].seq) else events

    async def last_seq(self, log: str) -> int:
        return await self._bus.last_seq(log) or await self._store.last_seq(log)

    async def read_all(self, log: str) -> list[Event]:
        """The whole log, however long."""
        return await read_all(self, log)

    @asynccontextmanager
    async def tail(self, log: str, start: int = 1) -> AsyncGenerator[AsyncIterator[Event]]:
        """The events of the log's history from `start`, then each new one as it is appended. Never ends by itself."""
        start = max(start, 1)
        there = await self._bus.read(log, start, limit=1)
        shared = await read_shared(self, there[0], start) if there else []
        start += len(shared)
        on_bus = there[0].seq <= start if there else await self._bus.last_seq(log)
        kept = 0 if on_bus else await self._store.last_seq(log)
        async with (
            self._bus.tail(log, max(start, kept + 1)) as live,
            aclosing(self._follow(shared, log, start, kept, live)) as events,
        ):
            yield events

    async def _follow(
        self, shared: list[Event], log: str, start: int, kept: int, live: AsyncIterator[Event]
    ) -> AsyncGenerator[Event]:
        for event in shared:
            yield event
        while start <= kept:
            page = await self._store.read(log, start, limit=min(PAGE, kept - start + 1))
            if not page:
                break
            for event in await read_shared(self, page[0], start):
                yield event
            for event in page:
                yield event
            start = page[-1].seq + 1
        async for event in live:
            yield event
