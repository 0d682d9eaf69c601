"""Keeps episodes coming: so many at a time, until it is told to stop; then it waits for the rest.

It owns the log of the run, as a trainer does: what workers report by mail enters that log in the append that
acknowledges it. Where the bus comes back as another one (it lost its data), what it knows of its log is put back, and
what has not ended is requested again: nobody else knows of a request that no worker has begun.
"""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator, Sequence

import anyio

from aworld_runtime.bus.base import Bus, Mail, read_all
from aworld_runtime.chaos.workload import request
from aworld_runtime.errors import Fenced
from aworld_runtime.events import (
    EpisodeFinished,
    Event,
    RunFinished,
    RunStarted,
)
from aworld_runtime.names import EPISODES_QUEUE, run_log
from aworld_runtime.nodes.owner import when_there_is_room

logger = logging.getLogger(__name__)
LOOK_S = 1.0


class Submitter:
    """Owner of the run `run_id`, with so many episodes `outstanding` at once."""

    def __init__(self, bus: Bus, run_id: str, *, outstanding: int) -> None:
        self._bus = bus
        self._run_id = run_id
        self._most = outstanding
        self._log = run_log(run_id)
        self._known: list[Event] = []
        self._outstanding: dict[str, Event] = {}
        self._changed = anyio.Event()
        self._stopping = False
        self._requested = 0
        self._appending = anyio.Lock()

    def stop(self) -> None:
        """Request no more."""
        self._stopping = True
        self._changed.set()

    async def run(self) -> None:
        """Until it was told to stop and every episode has ended."""
        await self._append([Event.of(RunStarted(kind="chaos"), source=self._source)])
        async with self._bus.mailbox(self._log) as mail, anyio.create_task_group() as tasks:
            tasks.start_soon(self._receive, mail)
            tasks.start_soon(self._watch_bus)
            await self._submit()
            tasks.cancel_scope.cancel()
        await self._append([Event.of(RunFinished(reason="stopped"), source=self._source)])

    @property
    def _source(self) -> str:
        return f"submitter/{self._run_id}"

    async def _submit(self) -> None:
        while self._outstanding or not self._stopping:
            if self._stopping or len(self._outstanding) >= self._most:
                self._changed = anyio.Event()
                await self._changed.wait()
                continue
            self._requested += 1
            requested = request(self._run_id, f"walk-{self._requested}")
            self._outstanding[requested.episode_id or ""] = requested
            await self._put(requested)

    async def _put(self, requested: Event) -> None:
        await when_there_is_room(lambda: self._bus.put(EPISODES_QUEUE, requested), who=self._source)

    async def _receive(self, mail: AsyncIterator[list[Mail]]) -> None:
        seen: set[str] = set()
        async for batch in mail:
            fresh = {m.event.id: m.event for m in batch if m.event.id not in seen}
            seen |= fresh.keys()
            if batch:
                await self._append(list(fresh.values()), batch)
            for event in fresh.values():
                if isinstance(event.data, EpisodeFinished):
                    self._outstanding.pop(event.episode_id or "", None)
            self._changed.set()

    async def _append(self, events: Sequence[Event], acks: Sequence[Mail] = ()) -> None:
        async with self._appending:
            while True:
                try:
                    await when_there_is_room(
                        lambda: self._bus.append(self._log, len(self._known), events, acks=acks),
                        who=self._source,
                    )
                    break
                except Fenced:
                    await self._put_back()
            self._known += events

    async def _put_back(self) -> None:
        """Append again what the bus lost of the run's log.

        Raises:
            Fenced: it holds something else: somebody else owns it.
        """
        there = await read_all(self._bus, self._log)
        lost = self._known[len(there) :]
        if not lost or [e.id for e in there] != [e.id for e in self._known[: len(there)]]:
            raise Fenced(
                f"{self._log}: {len(there)} events on the bus, not those that were appended"
            )
        logger.warning("%s: the bus lost %d events; they are put back", self._log, len(lost))
        await when_there_is_room(
            lambda: self._bus.append(self._log, len(there), lost), who=self._source
        )

    async def _watch_bus(self) -> None:
        """Request again what has not ended when the bus has become another one."""
        known = await self._bus.feed_id()
        while True:
            await anyio.sleep(LOOK_S * random.uniform(0.5, 1.0))
            now = await self._bus.feed_id()
            if now != known:
                known = now
                logger.warning("another bus: %d requests are put again", len(self._outstanding))
                async with self._appending:
                    if await self._bus.last_seq(self._log) < len(self._known):
                        await self._put_back()
                for requested in list(self._outstanding.values()):
                    await self._put(requested)
