"""Keeps episodes coming: so many at a time, until it is told to stop; then it waits for the rest.

It owns the log of the run, and follows what it requested as a runtime does.
"""

from __future__ import annotations

from itertools import count

import anyio

from aworld_runtime.archive.requests import Requests
from aworld_runtime.archive.run_log import RunLog
from aworld_runtime.bus.base import Bus
from aworld_runtime.chaos.workload import request
from aworld_runtime.events import Event, RunFinished, RunStarted
from aworld_runtime.store.base import Store

RESTORE_AFTER_S = 6.0
"""Seconds for owners to put their logs back, before the janitor restores the rest."""


class Submitter:
    """Owner of the run `run_id`, with so many episodes `outstanding` at once."""

    def __init__(self, bus: Bus, store: Store, run_id: str, *, outstanding: int) -> None:
        self._run_id = run_id
        self._source = f"submitter/{run_id}"
        self._outstanding = outstanding
        self._log = RunLog(bus, store, run_id)
        self._requests = Requests(
            bus, store, self._log, source=self._source, restore_after_s=RESTORE_AFTER_S
        )
        self._numbers = count(1)
        self._stopping = False

    def stop(self) -> None:
        """Request no more."""
        self._stopping = True

    async def run(self) -> None:
        """Until it was told to stop and every episode has ended."""
        await self._log.append([Event.of(RunStarted(kind="chaos"), source=self._source)])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._requests.run)
            async with anyio.create_task_group() as episodes:
                for _ in range(self._outstanding):
                    episodes.start_soon(self._one_after_another)
            tasks.cancel_scope.cancel()
        await self._log.append([Event.of(RunFinished(reason="stopped"), source=self._source)])

    async def _one_after_another(self) -> None:
        while not self._stopping:
            name = f"walk-{next(self._numbers)}"
            requested = request(self._run_id, name)
            episode_id = requested.episode_id or ""
            await self._requests.submit(episode_id, requested)
            await self._requests.wait(episode_id)
