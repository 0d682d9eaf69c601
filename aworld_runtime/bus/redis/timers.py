"""Delayed work appears when it is due, even while every consumer blocks.

    run: sleep until the first is due ─▶ move what is due ─▶ sleep until the next

Only for speed: consumers move what is due themselves, should this process be gone by then.
"""

from __future__ import annotations

import heapq
import logging

import anyio

from aworld_runtime.bus.redis.keys import QueueKeys
from aworld_runtime.bus.redis.link import Link
from aworld_runtime.bus.redis.scripts import queues
from aworld_runtime.errors import BusError

logger = logging.getLogger(__name__)


class Timers:
    """The delays that this bus has set."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._due: list[tuple[float, QueueKeys]] = []
        self._changed = anyio.Event()

    def set(self, keys: QueueKeys, delay_s: float) -> None:
        """Look at the queue after `delay_s`."""
        heapq.heappush(self._due, (anyio.current_time() + delay_s, keys))
        self._changed.set()

    async def run(self) -> None:
        """Serve until cancelled."""
        while True:
            self._changed = anyio.Event()
            if not self._due or self._due[0][0] > anyio.current_time():
                with anyio.move_on_at(self._due[0][0] if self._due else float("inf")):
                    await self._changed.wait()
                continue
            _, keys = heapq.heappop(self._due)
            try:
                # Milliseconds are cut off on the way: look again where it is not quite due yet.
                next_ms = await queues.promote(self._link, keys)
                if 0 <= next_ms < 10:
                    self.set(keys, (next_ms + 1) / 1000)
            except BusError as error:
                logger.warning("delayed work is moved later, by its consumers: %s", error)
