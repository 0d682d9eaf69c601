"""What a run has requested: each episode is followed until its end stands in the run's log, through whatever a server loses.

    submit ─▶ queue "episodes" ─▶ owner ─▶ mail ─▶ the run's log ─▶ wait
    a restarted server ─▶ the run's log is put back ─▶ ends that no mail told of are recorded
                       ─▶ what nobody had begun is requested again

What has begun is its owner's business, then the janitor's.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import anyio

from aworld_runtime.archive.logs import Logs, Patient
from aworld_runtime.archive.lost import after_loss, say_ended, say_lost
from aworld_runtime.archive.run_log import RunLog
from aworld_runtime.bus.base import LEASE_S, Bus, Mail
from aworld_runtime.bus.room import when_there_is_room
from aworld_runtime.events import EpisodeFinished, Event
from aworld_runtime.names import EPISODES_QUEUE, episode_log
from aworld_runtime.store.base import Store

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Unfinished:
    """An episode that somebody may wait for."""

    requested: Event
    on_end: Callable[[], object] | None
    begin: Callable[[], Awaitable[int]] | None
    """Puts the beginning of its log on the bus where that isn't there, and returns its last seq. None: it is empty."""
    begun_after: int = 0
    """Its last seq before anybody has claimed it."""
    ended: anyio.Event | None = None
    """Set once its end is in the run's log; there is one if somebody waits."""


class Requests:
    """One run's, as `source`; `log` is its log, which has no other writer but the caller. `run` does the following."""

    def __init__(
        self, bus: Bus, store: Store, log: RunLog, *, source: str, restore_after_s: float
    ) -> None:
        self._bus = bus
        self._logs = Logs(bus, Patient(store))
        self._log = log
        self._source = source
        self._patience_s = restore_after_s + LEASE_S
        """Until owners have put their logs back, or the janitor has."""
        self._unfinished: dict[str, _Unfinished] = {}
        self._recording = anyio.Lock()

    @property
    def unfinished(self) -> Collection[str]:
        """Episodes whose end is not yet in the run's log."""
        return self._unfinished.keys()

    async def submit(
        self,
        episode_id: str,
        requested: Event,
        *,
        on_end: Callable[[], object] | None = None,
        begin: Callable[[], Awaitable[int]] | None = None,
    ) -> None:
        """Queue an episode; `on_end` is called once its end is in the run's log. `begin` puts the beginning of a fork's log
        on the bus, where that isn't there, and returns its last seq.
        """
        requested = requested.kept_at(0)  # until the episode ends
        unfinished = _Unfinished(requested, on_end, begin)
        if begin is not None:
            unfinished.begun_after = await begin()
        self._unfinished[episode_id] = unfinished
        await self._put(requested)

    async def wait(self, episode_id: str) -> None:
        """Until it has ended; not at all for what was not submitted here."""
        if (unfinished := self._unfinished.get(episode_id)) is not None:
            unfinished.ended = unfinished.ended or anyio.Event()
            await unfinished.ended.wait()

    async def run(self) -> None:
        """Receive what owners report, and look after the server. Ends when it is cancelled."""
        async with self._bus.mailbox(self._log.name) as mail, anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch_server)
            async for batch in mail:
                await self._record([item.event for item in batch], acks=batch)

    async def _record(self, events: Sequence[Event], *, acks: Sequence[Mail] = ()) -> None:
        """Write down which episodes have ended, each once though the news comes at least once, and wake who waits."""
        async with self._recording:
            ended = {
                event.episode_id: event
                for event in events
                if isinstance(event.data, EpisodeFinished) and event.episode_id in self._unfinished
            }
            if ended or acks:
                await self._log.append(list(ended.values()), acks=acks)
            for episode_id in ended:
                unfinished = self._unfinished.pop(episode_id)
                if unfinished.on_end is not None:
                    unfinished.on_end()
                if unfinished.ended is not None:
                    unfinished.ended.set()

    async def _watch_server(self) -> None:
        async for lost_all in self._log.losses(patience_s=self._patience_s):
            if lost_all:
                await say_ended(self._bus, self._logs, self._log.newest, source=self._source)
            while unbegun := await self._record_what_ended():
                # What may still be queued is not queued again before the queue is empty.
                if lost_all or not await self._bus.backlog(EPISODES_QUEUE):
                    await self._request_again(unbegun, lost_all=lost_all)
                    break
                await anyio.sleep(LEASE_S)

    async def _record_what_ended(self) -> list[_Unfinished]:
        """Returns those unfinished that nobody has begun."""
        unbegun: list[_Unfinished] = []
        for episode_id, unfinished in tuple(self._unfinished.items()):
            log = episode_log(episode_id)
            if (last := await self._logs.last_seq(log)) > unfinished.begun_after:
                await self._record(await self._logs.read(log, last, limit=1))
            else:
                unbegun.append(unfinished)
        return unbegun

    async def _request_again(self, unbegun: Sequence[_Unfinished], *, lost_all: bool) -> None:
        logger.warning("the server lost %d requests; they are put again", len(unbegun))
        for unfinished in unbegun:
            requested = unfinished.requested
            if unfinished.begin is not None:
                await unfinished.begin()
                requested = after_loss(requested)
            elif lost_all:
                await say_lost(self._bus, requested, source=self._source)
            await self._put(requested)

    async def _put(self, requested: Event) -> None:
        put = partial(self._bus.put, EPISODES_QUEUE, requested)
        await when_there_is_room(put, who=self._source)
