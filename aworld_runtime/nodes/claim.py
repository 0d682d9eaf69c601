"""What an owner has in its hands: the claim in the queue, and the log as it knows it. Either may get lost with a server.

    the log on the bus is a strict prefix of what the owner knows  ─▶ the rest is put back: the very same events
    and the claim  is held  ─▶ the owner goes on
                   is taken ─▶ it drops the work: another worker takes over what is there now
                   is gone  ─▶ it queues the request again, and drops the work

Acknowledged events are facts, so whoever knows them may put them back; to go on takes the claim. Who has none may have been
taken over before, by a worker that died with the server's data, and may not know how the log went on. So the log says
`log.restored`, once all who know more of it have had the time to put that back.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial

import anyio

from aworld_runtime.bus.base import LEASE_S, Bus, Delivery
from aworld_runtime.bus.room import when_there_is_room
from aworld_runtime.errors import Fenced
from aworld_runtime.events import Event, LogRestored

logger = logging.getLogger(__name__)

OTHERS_S = LEASE_S
"""Seconds for all who know more of a log to put that back, too."""
AGAIN_S = OTHERS_S + 1.0
"""Seconds until an episode whose claim the server lost can be claimed again."""


class Claim:
    """One owner's, who writes as `source`. `delivery` None: nobody else can have it."""

    def __init__(
        self, bus: Bus, log: str, requested: Event, delivery: Delivery | None, *, source: str
    ) -> None:
        self._bus = bus
        self._log = log
        self._requested = requested
        self._delivery = delivery
        self._source = source
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
            put = partial(self._bus.put, queue, self._requested, at=later)
            await when_there_is_room(put, who=self._log)
            raise Fenced(f"the bus lost the claim on {self._log}; it is queued again")
        raise Fenced(f"the claim on {self._log} has gone to another worker")

    @property
    def _lock(self) -> anyio.Lock:
        """Whoever notices the loss second waits for the first: its `Fenced` ends the owner's work, and this with it."""
        self._mending = self._mending or anyio.Lock()
        return self._mending

    async def expect(self) -> None:
        """Before an empty log is begun. A worker that was stopped while the server lost its data has seen a claim that is
        no more; of the log, others or the store may know more.

        Raises:
            Fenced: it isn't held. Nothing is queued: whoever wants the episode requests it again.
        """
        if self._delivery is not None and await self._delivery.standing() != "held":
            raise Fenced(f"the claim on {self._log}, which is empty, is no longer held")

    async def put_back(self, known: Sequence[Event]) -> bool:
        """Append again what the server lost of the log; whether that was why an append was refused.

        The very same events: a store may have them already, and what they caused goes on.

        Raises:
            Fenced: the events are there again, but the claim is not held; see `check`.
        """
        async with self._lock:
            whole = tuple(known)
            first = there = await self._bus.last_seq(self._log)
            if first >= len(whole):
                return False
            while there < len(whole):  # others may put back what they know at the same time
                if not await self._is_prefix(there, whole):
                    return False
                append = partial(self._bus.append, self._log, there, whole[there:])
                restore = partial(self._bus.restore, self._log, whole)
                with suppress(Fenced):
                    await when_there_is_room(append if there else restore, who=self._log)
                there = await self._bus.last_seq(self._log)
            lost = len(whole) - first
            logger.warning(
                "%s: the bus lost its last %d events; they are put back", self._log, lost
            )
            try:
                await self._check()
            except Fenced:
                await self._say_restored(known)
                raise
        return True

    async def _say_restored(self, known: Sequence[Event]) -> None:
        """In the log, unless it has gone on since: then somebody knew more, or has it already."""
        await anyio.sleep(OTHERS_S)
        last = None
        while last != len(known):  # an append of its own may still have come between
            last = len(known)
            restored = self._requested.caused(LogRestored(at=last), source=self._source)
            with suppress(Fenced):
                await when_there_is_room(
                    partial(self._bus.append, self._log, last, [restored]), who=self._log
                )
                return

    async def _is_prefix(self, there: int, known: Sequence[Event]) -> bool:
        """Whether the log on the bus, `there` events long, is what `known` begins with: its last event tells."""
        last = await self._bus.read(self._log, there, limit=1) if there else ()
        return not there or [event.id for event in last] == [known[there - 1].id]
