"""What an owner has in its hands: the claim in the queue, and the log as it knows it. Either may get lost with a server.

    the log on the bus is a strict prefix of what the owner knows  ─▶ the rest is put back: the very same events
    and the claim  is held  ─▶ the owner goes on
                   is taken ─▶ it drops the work: another worker takes over what is there now
                   is gone  ─▶ it queues the request again, and drops the work

Whoever knows events may put them back; to go on takes the claim. Who has none may have been taken over before, by a worker
that died with the server's data, and may not know how the log went on. So all who know more of it get the time to put that
back, and then whoever claims the episode begins with `log.restored`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial

import anyio

from aworld_runtime.archive.lost import after_loss, put_back
from aworld_runtime.bus.base import LEASE_S, Bus, Delivery
from aworld_runtime.bus.room import when_there_is_room
from aworld_runtime.errors import Fenced
from aworld_runtime.events import Event

AGAIN_S = LEASE_S + 1.0
"""Seconds until an episode whose claim the server lost can be claimed again: for all who know more of its log, a janitor
among them, to put that back.
"""


class Claim:
    """One owner's. `delivery` None: nobody else can have it."""

    def __init__(self, bus: Bus, log: str, requested: Event, delivery: Delivery | None) -> None:
        self._bus = bus
        self._log = log
        self._requested = requested
        self._delivery = delivery
        self._mending: anyio.Lock | None = None
        """Made when it is needed, which is hardly ever: an idle episode should be small."""

    @property
    def lost(self) -> bool:
        """Known to be lost, without asking the server."""
        return self._delivery is not None and self._delivery.lost

    async def check(self) -> None:
        """See whether it is still held.

        Raises:
            Fenced: it isn't. Where the server lost it, the request is queued again: later, so that an owner who knows more
                of the log puts that back first.
        """
        async with self._lock:
            await self._check()

    async def _check(self) -> None:
        standing = "held" if self._delivery is None else await self._delivery.standing()
        if standing == "held" or self._delivery is None:
            return
        if standing == "gone":
            queue, later = self._delivery.queue, self._bus.now() + timedelta(seconds=AGAIN_S)
            put = partial(self._bus.put, queue, after_loss(self._requested), at=later)
            await when_there_is_room(put, who=self._log)
            raise Fenced(f"the bus lost the claim on {self._log}; it is queued again")
        raise Fenced(f"the claim on {self._log} has gone to another worker")

    @property
    def _lock(self) -> anyio.Lock:
        """Whoever notices the loss second waits for the first: its `Fenced` ends the owner's work, and this with it."""
        self._mending = self._mending or anyio.Lock()
        return self._mending

    async def expect(self) -> str:
        """Before an empty log is begun; returns the feed that the append must find. A worker that was stopped while the server
        lost its data has seen a claim that is no more; of the log, others or the store may know more.

        Raises:
            Fenced: it isn't held. Nothing is queued: whoever wants the episode requests it again.
        """
        feed_id = await self._bus.feed_id(self._log)
        if self._delivery is not None and await self._delivery.standing() != "held":
            raise Fenced(f"the claim on {self._log}, which is empty, is no longer held")
        return feed_id

    async def put_back(self, known: Sequence[Event]) -> bool:
        """Put back what the server lost of the log; whether that was why an append was refused.

        Raises:
            Fenced: the events are there again, but the claim is not held; see `check`.
        """
        async with self._lock:
            if not await put_back(self._bus, self._log, tuple(known)):
                return False
            await self._check()
        return True
