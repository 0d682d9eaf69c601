"""A run's log as its only writer keeps it: appended to, and put back where the server lost it.

Of a long run the writer keeps the newest events in memory, and the store has the rest.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial

import anyio

from aworld_runtime.archive.lost import put_back
from aworld_runtime.bus.base import Bus, Mail, Readable, read_all
from aworld_runtime.bus.restarts import restarts
from aworld_runtime.bus.room import when_there_is_room
from aworld_runtime.errors import BusError, Fenced
from aworld_runtime.events import Event
from aworld_runtime.names import run_log

KNOWN = 1000
"""Newest events in memory: more than an archiver that is at work is behind."""
PAGE = 256


class RunLog:
    """One writer's, who waits `patience_s` for a bus that is full."""

    def __init__(
        self, bus: Bus, store: Readable, run_id: str, *, patience_s: float = math.inf
    ) -> None:
        self.name = run_log(run_id)
        self._bus = bus
        self._store = store
        self._patience_s = patience_s
        self._known: deque[Event] = deque(maxlen=KNOWN)
        self._last = 0
        self._appending = anyio.Lock()

    @property
    def newest(self) -> Sequence[Event]:
        """The newest events, as many as are in memory."""
        return tuple(self._known)

    async def resume(self) -> list[Event]:
        """Go on with a log that another writer may have begun; all of it."""
        async with self._appending:
            past = await read_all(self._bus, self.name)
            self._known = deque(past, maxlen=KNOWN)
            self._last = past[-1].seq if past else 0
        return past

    async def append(
        self, events: Sequence[Event], *, acks: Sequence[Mail] = ()
    ) -> Sequence[Event]:
        """Add events, and acknowledge mail; the events at their places in the log.

        Raises:
            Fenced: somebody else has appended.
            BusFullError: the bus still is, after its writer's patience.
            BusError: the server lost the log, and what neither the store nor this writer has of it is lost.
        """
        async with self._appending:
            append = partial(self._bus.append, self.name, self._last, events, acks=acks)
            try:
                await self._send(append)
            except Fenced:
                if not await self._put_back():
                    raise
                await self._send(append)
            appended = [event.at(seq) for seq, event in enumerate(events, self._last + 1)]
            self._known += appended
            self._last += len(appended)
            return appended

    async def losses(self, *, patience_s: float) -> AsyncGenerator[bool]:
        """Each time the server was restarted: the log is put back at once. After `patience_s`, in which owners and the janitor
        put back theirs, whether the server had lost everything. Never ends by itself; raises as `append` does.
        """
        feed_id = await self._bus.feed_id()
        async for _ in restarts(self._bus):
            async with self._appending:
                if await self._bus.last_seq(self.name) < self._last:
                    await self._put_back()
            await anyio.sleep(patience_s)
            before, feed_id = feed_id, await self._bus.feed_id()
            yield feed_id != before

    async def _put_back(self) -> bool:
        events: list[Event] = []
        oldest = self._known[0].seq if self._known else 1
        while len(events) < oldest - 1 and (
            page := await self._store.read(self.name, len(events) + 1, limit=PAGE)
        ):
            events += page
        events = [*events[: oldest - 1], *self._known]
        if [event.seq for event in events] != list(range(1, self._last + 1)):
            raise BusError(
                f"the bus lost {self.name}, and the store has {len(events) - len(self._known)} of its first"
                f" {oldest - 1} events: the run can't go on"
            )
        return bool(await put_back(self._bus, self.name, events))

    async def _send(self, append: Callable[[], Awaitable[int]]) -> None:
        await when_there_is_room(append, who=self.name, patience_s=self._patience_s)
