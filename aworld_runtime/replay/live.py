"""An episode that somebody runs: its log as it grows, and a person's word to its owner."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import anyio

from aworld_runtime.bus.base import Bus, Readable, read_all
from aworld_runtime.errors import RequestTimeoutError
from aworld_runtime.events import EpisodeFinished, Event, EventData
from aworld_runtime.names import episode_log

HEARD_S = 10.0
"""Until the owner has taken what it is told."""


class Followed(Readable, Protocol):
    """Where logs are, and grow: a bus, alone or with a store."""

    def tail(
        self, log: str, start: int = 1
    ) -> AbstractAsyncContextManager[AsyncIterator[Event]]: ...


class Live:
    """One episode; `events` is its history, whose newest part is read as it is asked for."""

    def __init__(self, bus: Bus, logs: Followed, episode_id: str) -> None:
        self.episode_id = episode_id
        self.events: list[Event] = []
        self._bus = bus
        self._logs = logs
        self._log = episode_log(episode_id)

    @property
    def finished(self) -> bool:
        return bool(self.events) and isinstance(self.events[-1].data, EpisodeFinished)

    @property
    def is_here(self) -> bool:
        """Whether its worker is in this process, and ends with it."""
        return self._bus.url.startswith("memory:")

    async def look(self) -> None:
        """Read what has come."""
        self.events += await read_all(self._logs, self._log, len(self.events) + 1)

    async def begin(self) -> None:
        """Read what is there; wait for the first event."""
        await self.look()
        if not self.events:
            await self.more()

    async def more(self) -> None:
        """Wait until something has come."""
        known = len(self.events)
        async with self._logs.tail(self._log, known + 1) as events:
            async for _ in events:
                break
        await self.look()

    async def tell(self, data: EventData) -> None:
        """Mail it to the owner; returns once it is in the log, or the episode has ended.

        Raises:
            RequestTimeoutError: nobody takes it.
        """
        word = self.events[-1].caused(data, source="cli/debug", trust="user")
        await self._bus.send_mail(self._log, word)
        with anyio.move_on_after(HEARD_S):
            while not self.finished:
                known = len(self.events)
                await self.more()
                if any(event.id == word.id for event in self.events[known:]):
                    return
        if not self.finished:
            raise RequestTimeoutError(
                f"the owner of episode {self.episode_id} has not taken {data.type} in {HEARD_S:g} s: is there a"
                f" worker on {self._bus.url}?"
            )
