"""A pause, and an alarm that it puts off."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import anyio

from aworld_runtime.events import EpisodePaused, EpisodeResumed, Event, utc_now


class Pause:
    """Whether an episode is paused. To pause it twice is to pause it once."""

    def __init__(self) -> None:
        self.active = False
        self._over: anyio.Event | None = None
        """Only while somebody waits for it."""
        self._tell: Callable[[], None] | None = None
        self._left_s = 0.0
        self._alarm: asyncio.TimerHandle | None = None
        """None in a pause."""

    def begin(self) -> None:
        if not self.active:
            self.active = True
            if self._alarm is not None:
                self._left_s = self._alarm.when() - asyncio.get_running_loop().time()
                self.call_off()

    def end(self) -> None:
        if self.active:
            self.active = False
            if self._tell is not None:
                self.call_in(self._left_s, self._tell)
            if self._over is not None:
                self._over.set()
                self._over = None

    async def over(self) -> None:
        """Wait until nothing is paused."""
        while self.active:
            self._over = self._over or anyio.Event()
            await self._over.wait()

    def call_in(self, seconds: float, tell: Callable[[], None]) -> None:
        """Call `tell` after so long, pauses not counted."""
        self._tell, self._left_s = tell, max(seconds, 0)
        if not self.active:
            self._alarm = asyncio.get_running_loop().call_later(self._left_s, tell)

    def call_off(self) -> None:
        """What is not called yet won't be."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None


def paused_s(events: Sequence[Event]) -> float:
    """How long, by the log, an episode has been paused until now."""
    seconds, began = 0.0, None
    for event in events:
        if isinstance(event.data, EpisodePaused):
            began = began or event.time
        elif isinstance(event.data, EpisodeResumed) and began is not None:
            seconds += max((event.time - began).total_seconds(), 0)
            began = None
    if began is not None:
        seconds += max((utc_now() - began).total_seconds(), 0)
    return seconds
