"""Keeps episodes coming: so many at a time, until it is told to stop; then it waits for the rest.

It owns the log of the run, as a trainer does: what workers report by mail enters that log in the append that
acknowledges it. Where the server comes back without its data, what it knows of its log is put back, and what has not begun
is requested again: nobody else knows of a request that no worker has begun.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence

import anyio

from aworld_runtime.archive.logs import Logs, Patient
from aworld_runtime.archive.lost import say_ended, say_lost
from aworld_runtime.archive.run_log import RunLog
from aworld_runtime.bus.base import LEASE_S, Bus, Mail
from aworld_runtime.chaos.workload import request
from aworld_runtime.events import (
    EpisodeFinished,
    Event,
    RunFinished,
    RunStarted,
)
from aworld_runtime.names import EPISODES_QUEUE, episode_log, run_log
from aworld_runtime.nodes.claim import restarts
from aworld_runtime.nodes.owner import when_there_is_room
from aworld_runtime.store.base import Store

logger = logging.getLogger(__name__)
RESTORE_AFTER_S = 6.0
"""Seconds for owners to put their logs back, before the janitor restores the rest."""


class Submitter:
    """Owner of the run `run_id`, with so many episodes `outstanding` at once."""

    def __init__(self, bus: Bus, store: Store, run_id: str, *, outstanding: int) -> None:
        self._bus = bus
        self._logs = Logs(bus, Patient(store))
        self._run_id = run_id
        self._most = outstanding
        self._log = RunLog(bus, store, run_id)
        self._outstanding: dict[str, Event] = {}
        self._changed = anyio.Event()
        self._stopping = False
        self._requested = 0
        self._recording = anyio.Lock()

    def stop(self) -> None:
        """Request no more."""
        self._stopping = True
        self._changed.set()

    async def run(self) -> None:
        """Until it was told to stop and every episode has ended."""
        await self._log.append([Event.of(RunStarted(kind="chaos"), source=self._source)])
        async with (
            self._bus.mailbox(run_log(self._run_id)) as mail,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(self._receive, mail)
            tasks.start_soon(self._watch_server)
            await self._submit()
            tasks.cancel_scope.cancel()
        await self._log.append([Event.of(RunFinished(reason="stopped"), source=self._source)])

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
        async for batch in mail:
            await self._record([item.event for item in batch], batch)

    async def _record(self, events: Sequence[Event], acks: Sequence[Mail] = ()) -> None:
        """Enter the ends among them into the log, each once: they come at least once."""
        async with self._recording:
            ended = {
                event.episode_id or "": event
                for event in events
                if isinstance(event.data, EpisodeFinished) and event.episode_id in self._outstanding
            }
            if ended or acks:
                await self._log.append(list(ended.values()), acks=acks)
            for episode_id in ended:
                del self._outstanding[episode_id]
            self._changed.set()

    async def _watch_server(self) -> None:
        """See to what a server that was restarted may have lost, as a runtime does: the run's log, requests that nobody
        had begun, the news that an episode has ended. What has begun is its owner's business, then the janitor's.
        """
        feed_id = await self._bus.feed_id()
        async for _ in restarts(self._bus):
            await self._log.put_back()
            await anyio.sleep(RESTORE_AFTER_S + LEASE_S)
            lost_all = await self._bus.feed_id() != feed_id
            feed_id = await self._bus.feed_id()
            if lost_all:
                await say_ended(self._bus, self._logs, self._log.newest, source=self._source)
            # What may still be queued is not queued again before the queue is empty.
            while unbegun := await self._record_what_ended():
                if lost_all or not await self._bus.backlog(EPISODES_QUEUE):
                    logger.warning("%d requests are put again", len(unbegun))
                    for requested in unbegun:
                        if lost_all:
                            await say_lost(self._bus, requested, source=self._source)
                        await self._put(requested)
                    break
                await anyio.sleep(LEASE_S)

    async def _record_what_ended(self) -> list[Event]:
        """Of what is outstanding; returns the requests of those episodes that have no log."""
        unbegun: list[Event] = []
        for episode_id, requested in tuple(self._outstanding.items()):
            log = episode_log(episode_id)
            if last := await self._logs.last_seq(log):
                await self._record(await self._logs.read(log, last, limit=1))
            else:
                unbegun.append(requested)
        return unbegun
