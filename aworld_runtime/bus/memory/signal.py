"""Waiting for a change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import anyio


class Signal:
    """Wakes those who wait for a change; costs nothing while nobody does."""

    __slots__ = ("_calls", "_waiters")

    def __init__(self) -> None:
        # Futures, not anyio.Events: these cost five times as much, and every mailbox and tail has one.
        self._waiters: dict[asyncio.Future[None], None] = {}
        self._calls: tuple[Callable[[], None], ...] = ()

    def notify_one(self) -> None:
        """Wake who has waited longest."""
        while self._waiters:
            waiter = next(iter(self._waiters))
            del self._waiters[waiter]
            if not waiter.done():  # else it was cancelled, and has not run since
                waiter.set_result(None)
                return

    def call(self, tell: Callable[[], None]) -> None:
        """Have it called, soon after the next change of which all are notified."""
        self._calls = (*self._calls, tell)

    def notify_all(self) -> None:
        if self._calls:
            calls, self._calls = self._calls, ()
            for tell in calls:
                asyncio.get_running_loop().call_soon(tell)
        if self._waiters:
            waiters, self._waiters = self._waiters, {}
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def wait(self, timeout_s: float | None = None) -> None:
        """Return at the next change, or after `timeout_s`."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        try:
            if timeout_s is None:
                await waiter
            else:
                with anyio.move_on_after(timeout_s):
                    await waiter
        except BaseException:
            if (
                waiter.done() and not waiter.cancelled()
            ):  # woken and cancelled at once: the change is for another to see
                self.notify_one()
            raise
        finally:
            self._waiters.pop(waiter, None)
