"""A pause, and a clock that stands still meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import anyio

from aworld_runtime.events import EpisodePaused, EpisodeResumed, Event, utc_now


class Pause:
    """Whether an episode is paused. To pause it twice is to pause it once."""

    def __init__(self) -> None:
        self.active = False
        self._began = 0.0
        self._past_s = 0.0
        self._changed: anyio.Event | None = None
        """Only while somebody waits for it."""

    def begin(self) -> None:
        if not self.active:
            self.active, self._began = True, anyio.current_time()
            self._tell()

    def end(self) -> None:
        if self.active:
            self._past_s += anyio.current_time() - self._began
            self.active = False
            self._tell()

    async def over(self) -> None:
        """Wait until nothing is paused."""
        while self.active:
            await self._change()

    async def sleep(self, seconds: float) -> None:
        """Sleep, without counting pauses."""
        until = self._time() + seconds
        while (left := until - self._time()) > 0:
            await self.over()
            with anyio.move_on_after(left):
                await self._change()

    def _time(self) -> float:
        """A clock that stands still in a pause."""
        return (self._began if self.active else anyio.current_time()) - self._past_s

    async def _change(self) -> None:
        if self._changed is None:
            self._changed = anyio.Event()
        await self._changed.wait()

    def _tell(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None


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
