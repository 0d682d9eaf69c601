"""Waiting for a change."""

from __future__ import annotations

import anyio


class Signal:
    """Wakes those who wait for a change; costs nothing while nobody does."""

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters: dict[anyio.Event, None] = {}

    def notify_one(self) -> None:
        """Wake who has waited longest."""
        for waiter in self._waiters:
            del self._waiters[waiter]
            waiter.set()
            return

    def notify_all(self) -> None:
        if self._waiters:
            waiters, self._waiters = self._waiters, {}
            for waiter in waiters:
                waiter.set()

    async def wait(self, timeout_s: float | None = None) -> None:
        """Return at the next change, or after `timeout_s`."""
        waiter = anyio.Event()
        self._waiters[waiter] = None
        try:
            if timeout_s is None:
                await waiter.wait()
            else:
                with anyio.move_on_after(timeout_s):
                    await waiter.wait()
        except BaseException:
            if waiter.is_set():  # woken and cancelled at once: the change is for another to see
                self.notify_one()
            raise
        finally:
            self._waiters.pop(waiter, None)
