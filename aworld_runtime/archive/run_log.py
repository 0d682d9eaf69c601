"""A run's log as its only writer keeps it: appended to, and put back where the server lost it.

Of a long run the writer knows the newest events, and the store the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial

import anyio

from aworld_runtime.archive.lost import put_back
from aworld_runtime.bus.base import Bus, Mail
from aworld_runtime.bus.room import when_there_is_room
from aworld_runtime.errors import BusError, Fenced
from aworld_runtime.events import Event
from aworld_runtime.names import run_log
from aworld_runtime.store.base import Store

KNOWN = 1000
"""Newest events in memory: more than an archiver that is at work is behind."""
PAGE = 256


class RunLog:
    """One writer's."""

    def __init__(self, bus: Bus, store: Store, run_id: str) -> None:
        self.name = run_log(run_id)
        self._bus = bus
        self._store = store
        self._known: deque[Event] = deque(maxlen=KNOWN)
        self._last = 0
        self._appending = anyio.Lock()

    @property
    def newest(self) -> Sequence[Event]:
        """The newest events, as many as are in memory."""
        return tuple(self._known)

    async def append(self, events: Sequence[Event], *, acks: Sequence[Mail] = ()) -> None:
        """Add events, and acknowledge mail.

        Raises:
            Fenced: somebody else has appended.
            BusError: the server lost the log, and what neither the store nor this writer has of it is lost.
        """
        async with self._appending:
            append = partial(self._bus.append, self.name, self._last, events, acks=acks)
            try:
                last = await when_there_is_room(append, who=self.name)
            except Fenced:
                if not await self._put_back():
                    raise
                last = await when_there_is_room(append, who=self.name)
            self._known += [event.at(seq) for seq, event in enumerate(events, self._last + 1)]
            self._last = last

    async def put_back(self) -> None:
        """If the server lost some of it. Raises as `append` does."""
        async with self._appending:
            if await self._bus.last_seq(self.name) < self._last:
                await self._put_back()

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
                f"the bus lost {self.name}, and {self._store.url} has {len(events) - len(self._known)} of its first"
                f" {oldest - 1} events: the run can't go on"
            )
        return bool(await put_back(self._bus, self.name, events))
