"""What an exported file holds, into a store.

    compare with what the store has ──▶ events, log by log, each episode's record after them ──▶ rows ──▶ the run's record

What is there stays as it is, and large content that is lost there is put back; an import that was interrupted shows no half episode, and is completed by importing again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from itertools import islice

from aworld_runtime.archive.records import advance, advance_run
from aworld_runtime.errors import LogRewoundError, MissingBlobError
from aworld_runtime.events import Event, Registry, StepFinished
from aworld_runtime.names import episode_of_log, run_of_log
from aworld_runtime.payloads import Blob
from aworld_runtime.replay.exported import ExportedFile
from aworld_runtime.store.base import EpisodeRecord, RunRecord, Store

ROWS_AT_ONCE = 64


async def put_into(
    store: Store, exported: ExportedFile, tell: Callable[[int], object] = lambda _: None
) -> int:
    """Write what `store` lacks of a file that was checked; returns how many events that are. `tell` hears how many are done.

    Raises:
        LogRewoundError: the store has other events in one of its logs; nothing was changed.
    """
    return await _Import(store, exported, tell).run()


class _Import:
    def __init__(self, store: Store, exported: ExportedFile, tell: Callable[[int], object]) -> None:
        self._store = store
        self._exported = exported
        self._tell = tell
        self._had: dict[str, int] = {}
        """How far the store had each log."""
        self._events = self._new = 0
        self._registry = Registry()

    async def run(self) -> int:
        logs = self._exported.manifest.logs
        for log in logs:
            await self._compare(log)
        for log in logs:
            if (episode_id := episode_of_log(log)) is not None:
                await self._put_episode(log, episode_id)
        rows = self._exported.rows()
        while page := list(islice(rows, ROWS_AT_ONCE)):
            await self._store.put_rollouts(page)
        for log in logs:
            if (run_id := run_of_log(log)) is not None:
                await self._put_run(log, run_id)
        return self._new

    async def _compare(self, log: str) -> None:
        had = self._had[log] = await self._store.last_seq(log)
        if not had:
            return
        for page in self._exported.pages(log):
            try:
                there = await self._store.read(log, page[0].seq, limit=len(page))
            except MissingBlobError:
                await self._put_blobs(page)
                there = await self._store.read(log, page[0].seq, limit=len(page))
            ids = {event.seq: event.id for event in there}
            for event in page:
                if ids.get(event.seq, event.id) != event.id:
                    raise LogRewoundError(
                        f"{self._store.url} has another {log}: event {event.seq} is {ids[event.seq]} there and {event.id}"
                        f" ({event.type}) in {self._exported.path}. Nothing was changed; name another store"
                    )
            if page[-1].seq >= had:
                return

    async def _put_blobs(self, page: Sequence[Event]) -> None:
        """Put back what the store may have lost of these events; it is named by its content, so it does no harm elsewhere."""
        blobs: list[Blob] = []
        for event in page:
            self._registry.encode_apart(event, blobs)
        for blob in blobs:
            await self._store.put_blob(blob.content)

    async def _put_episode(self, log: str, episode_id: str) -> None:
        span = self._exported.manifest.logs[log]
        kept = await self._store.episode(episode_id)
        if self._had[log] >= span.last and (span.prefix or (kept and kept.last_seq >= span.last)):
            self._events += span.events
            return
        record = EpisodeRecord(id=episode_id)
        async for event in self._put_events(log):
            record = advance(record, event)
        # One that is as new has a feed, which ours hasn't.
        if not span.prefix and (kept is None or kept.last_seq < record.last_seq):
            await self._store.put_episode(record)

    async def _put_run(self, log: str, run_id: str) -> None:
        record: RunRecord | None = None
        async for event in self._put_events(log):
            record = advance_run(record, run_id, event)
            if isinstance(event.data, StepFinished):
                await self._store.put_metrics(run_id, event.data.step, event.data.metrics)
        if record is not None and self._had[log] <= self._exported.manifest.logs[log].last:
            await self._store.put_run(record)

    async def _put_events(self, log: str) -> AsyncIterator[Event]:
        """The log's events, once they are in the store."""
        for page in self._exported.pages(log):
            if page[-1].seq > self._had[log]:
                await self._store.put_events(log, page)
            for event in page:
                yield event
            self._events += len(page)
            self._new += sum(event.seq > self._had[log] for event in page)
            self._tell(self._events)
