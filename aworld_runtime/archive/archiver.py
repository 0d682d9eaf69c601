"""Copies every log from the bus to the store, off the hot path.

    bus.feed ──▶ entries ──▶ one span per log ──▶ ≤ 8 logs at once: bus.read ──▶ put_events ──▶ put_episode, put_run,
       ▲            (waits a little, so that entries gather)                                    put_metrics
       └── cursor, moved once all of it is written ◀──────────────────────────────────────────┘

The feed itself is the buffer: while the store is away nothing is taken from it, and nobody waits for the archiver. A
crash before the cursor moves means doing the entries again, which changes nothing; so several archivers may run, too.
A log that can't be archived (it was rewound, it can't be decoded) is an incident: logged as an error, kept in
`incidents`, and passed over, so that the others go on.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from secrets import token_hex
from types import TracebackType
from typing import Self, TypeVar

import anyio
from anyio.abc import TaskGroup
from pydantic import JsonValue

from aworld_runtime import telemetry
from aworld_runtime.archive.marker import is_marker, marked, new_marker
from aworld_runtime.archive.records import advance, advance_run
from aworld_runtime.bus.base import READER_BELIEVED_S, Bus, FeedEntry, NodeInfo
from aworld_runtime.bus.presence import announce
from aworld_runtime.errors import (
    AWorldError,
    BusError,
    EventError,
    LogRewoundError,
    StoreError,
    StoreUnavailableError,
)
from aworld_runtime.events import Event, StepFinished, utc_now
from aworld_runtime.forks import OwnEvents
from aworld_runtime.names import episode_of_log, run_of_log
from aworld_runtime.store.base import EpisodeRecord, RunRecord, Store

logger = logging.getLogger(__name__)

LINGER_S = 0.05
"""Seconds between two looks at the feed: one commit for many small appends."""
LOGS_AT_ONCE = 8
EVENTS_AT_ONCE = 256
"""Events of one log in memory."""
FIRST_RETRY_S = 0.05
LAST_RETRY_S = 2.0
LOOK_S = 1.0
"""Seconds between two looks at whether the feed is still the same."""
LOGS_KNOWN = 10_000
RECORDS_KEPT = 4096
"""Records of unfinished episodes in memory; others are read back from the store."""

T = TypeVar("T")


class Archiver:
    """Runs inside `async with`, or as `run()` in a task group of yours. Call `drain` before you leave."""

    def __init__(self, bus: Bus, store: Store, name: str = "archiver") -> None:
        self.name = name
        self.incidents: dict[str, AWorldError] = {}
        """Logs that could not be archived, and why."""
        self.archived = 0
        """Events that it has written to the store."""
        self.feed_id: str | None = None
        """The feed it follows; None before it has begun."""
        self.cursor = "0"
        """Everything in the feed up to here is in the store."""
        self.listeners: list[Callable[[Mapping[str, int], str], None]] = []
        """Told which logs have ended at which seq, now that they are in the store, and a cursor before that."""
        self.told_of_beginnings: list[Callable[[str], None]] = []
        """Told of a log that came back on a feed after a loss, and of which the store may have more than the bus."""
        self._ended: dict[str, int] = {}
        self._bus = bus
        self._store = store
        self._known: set[str] = set()
        """Logs that this archiver has written to."""
        self._records: dict[str, EpisodeRecord] = {}
        self._runs: dict[str, RunRecord] = {}
        self._markers: dict[str, anyio.Event] = {}
        self._hurry = anyio.Event()
        self._outage: float | None = None
        self._trouble: StoreError | None = None
        self._oldest = math.inf
        """When the oldest event was made that is read and may not be in the store yet."""
        self._group: TaskGroup | None = None
        self._since = utc_now()
        self._token = token_hex(2)
        telemetry.ARCHIVER_LAG.watch(self, Archiver.lag_s)

    async def __aenter__(self) -> Self:
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        self._group.start_soon(self.run, name=self.name)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        group, self._group = self._group, None
        if group is None:
            return None
        group.cancel_scope.cancel()
        if isinstance(error, Exception):  # the caller's own: it stays as it is, in no group
            await group.__aexit__(None, None, None)
            return None
        return await group.__aexit__(kind, error, trace)

    async def run(self) -> None:
        """Archive until cancelled; from the beginning again where the server has lost its data."""
        self._since = self._bus.now()
        async with anyio.create_task_group() as tasks:
            say = partial(announce, self._bus, self._nodes, who=self.name, ttl_s=READER_BELIEVED_S)
            tasks.start_soon(say)
            while True:
                feed_id = await self._bus.feed_id()
                async with anyio.create_task_group() as following:
                    following.start_soon(self._follow, feed_id)
                    while await self._bus.feed_id() == feed_id:  # noqa: ASYNC110 - it is another process's
                        await anyio.sleep(LOOK_S)
                    following.cancel_scope.cancel()
                logger.warning("the feed is another: the server has lost its data; archiving anew")

    async def _follow(self, feed_id: str) -> None:
        # The cursor's name in the store says which feed it belongs to.
        follower = f"{self.name}@{feed_id}"
        after = await self._persist(lambda: self._store.cursor(follower))
        self.feed_id, self.cursor = feed_id, after or "0"
        async with self._bus.feed(self.cursor) as feed:
            async for entries in feed:
                await self._archive(follower, entries)
                await self._gather()
                self._oldest = math.inf

    def _nodes(self) -> Iterable[NodeInfo]:
        detail: dict[str, JsonValue] = {"feed": self.feed_id, "cursor": self.cursor}
        if self.incidents:
            detail["incidents"] = len(self.incidents)
        yield NodeInfo(
            name=f"{self.name}/{socket.gethostname()}-{os.getpid()}-{self._token}",
            kind="archiver",
            pid=os.getpid(),
            host=socket.gethostname(),
            behind_s=round(self.lag_s(), 3),
            since=self._since,
            detail=detail,
        )

    def lag_s(self) -> float:
        """Age of the oldest event that is read and may not be in the store yet; 0 where none is."""
        return max(time.time() - self._oldest, 0.0)

    async def drain(self, timeout_s: float = 30.0) -> None:
        """Wait until everything appended so far is archived.

        Raises:
            StoreUnavailableError: it isn't after `timeout_s`; the bus still has it.
        """
        marker = new_marker()
        seen = self._markers[marker] = anyio.Event()
        self._hurry.set()
        try:
            with anyio.move_on_after(timeout_s):
                async with marked(self._bus, marker):
                    await seen.wait()
        finally:
            del self._markers[marker]
        if not seen.is_set():
            why = self._trouble or "it is slow, or its archiver does not run"
            raise StoreUnavailableError(
                f"not everything is archived in {self._store.url} after {timeout_s:g} s: {why}. The bus"
                " still has it, and an archiver on the same bus goes on from here"
            )

    # inside

    async def _gather(self) -> None:
        if self._markers:
            return
        self._hurry = anyio.Event()
        with anyio.move_on_after(LINGER_S):
            await self._hurry.wait()

    async def _archive(self, follower: str, entries: Sequence[FeedEntry]) -> None:
        spans: dict[str, tuple[int, int]] = {}
        for entry in entries:
            if not is_marker(entry.log):
                first, last = spans.get(entry.log, (entry.first, entry.last))
                spans[entry.log] = (min(first, entry.first), max(last, entry.last))
        logs = iter(spans.items())

        async def copy_logs() -> None:
            for log, (first, last) in logs:
                await self._copy_log(log, first, last)

        async with anyio.create_task_group() as group:
            for _ in range(min(LOGS_AT_ONCE, len(spans))):
                group.start_soon(copy_logs)
        cursor = entries[-1].cursor
        await self._persist(lambda: self._store.set_cursor(follower, cursor))
        before, self.cursor = self.cursor, cursor
        ended, self._ended = self._ended, {}
        for listener in self.listeners:
            listener(ended, before)
        for entry in entries:
            if entry.log in self._markers:
                self._markers[entry.log].set()

    async def _copy_log(self, log: str, first: int, last: int) -> None:
        if log in self.incidents:
            return
        try:
            await self._copy(log, first, last)
        except (EventError, LogRewoundError, LostEvents) as error:
            if isinstance(error, EventError) and await self._bus.feed_id() != self.feed_id:
                return  # large content went with the server; who puts it back has it archived anew
            self.incidents[log] = error
            telemetry.INCIDENTS.add()
            logger.error("log %s is not archived from event %d on: %s", log, first, error)

    async def _copy(self, log: str, first: int, last: int) -> None:
        announced, own = first, OwnEvents(log)
        if log not in self._known and first > 1:
            # A log rewound before this archiver came shows at the event before. And a store that came late has not got
            # what the feed told of it: that is trimmed behind other archivers.
            kept = await self._persist(lambda: self._store.last_seq(log))
            first = min(first - 1, kept + 1)
        while first <= last:
            limit = min(EVENTS_AT_ONCE, last - first + 1)
            events = await self._bus.read(log, first, limit=limit)
            # Of a log that the bus let go the last event is still there, at most.
            gap = min(last, events[0].seq - 1) if events else last
            if gap >= max(first, announced):
                await self._expect_archived(log, max(first, announced), gap)
            if gap == last:
                return
            first = events[-1].seq + 1
            if events := own.among(events):
                await self._keep(log, events)
        self._know(log)

    async def _keep(self, log: str, events: Sequence[Event]) -> None:
        self._oldest = min(self._oldest, events[0].time.timestamp())
        if log not in self._known:
            await self._expect_record(log, events[0])
        await self._persist(lambda: self._store.put_events(log, events))
        self.archived += len(events)
        telemetry.ARCHIVED.add(len(events))
        await self._project(log, events)

    def _know(self, log: str) -> None:
        if len(self._known) >= LOGS_KNOWN:
            self._known.clear()
        self._known.add(log)

    async def _expect_archived(self, log: str, first: int, last: int) -> None:
        kept = await self._persist(lambda: self._store.last_seq(log))
        # Where the whole server was lost, owners put back what they know; it is archived anew.
        if kept < last and await self._bus.feed_id() == self.feed_id:
            raise LostEvents(
                f"events {first} to {last} of log {log!r} are no longer on the bus, and the store has {kept}: the bus"
                " lost acknowledged events, or a log was unlinked before it was archived"
            )

    async def _expect_record(self, log: str, first: Event) -> None:
        """An episode has a record before it has events: of one without it no janitor knows when the server loses its data."""
        episode_id = episode_of_log(log)
        if episode_id is not None and (record := await self._episode(episode_id)).feed is None:
            begun = advance(record, first).model_copy(update={"feed": self.feed_id})
            await self._persist(lambda: self._store.put_episode(begun))
            self._remember(begun)

    async def _project(self, log: str, events: Sequence[Event]) -> None:
        if (episode_id := episode_of_log(log)) is not None:
            record = await self._episode(episode_id)
            if record.last_seq > events[-1].seq and record.feed != self.feed_id:
                for tell in self.told_of_beginnings:
                    tell(log)
            for event in events:
                record = advance(record, event)
            record = record.model_copy(update={"feed": self.feed_id})
            await self._persist(lambda: self._store.put_episode(record))
            self._remember(record)
            if record.status is not None:
                self._ended[log] = record.last_seq
        elif (run_id := run_of_log(log)) is not None:
            await self._project_run(run_id, log, events)

    async def _episode(self, episode_id: str) -> EpisodeRecord:
        """The record so far. The cursor moves after it is kept, so what comes next in the feed comes next in it."""
        if (record := self._records.get(episode_id)) is not None:
            return record
        kept = await self._persist(lambda: self._store.episode(episode_id))
        return kept or EpisodeRecord(id=episode_id)

    def _remember(self, record: EpisodeRecord) -> None:
        self._records.pop(record.id, None)
        if record.status is None:
            self._records[record.id] = record
            if len(self._records) > RECORDS_KEPT:
                del self._records[next(iter(self._records))]

    async def _project_run(self, run_id: str, log: str, events: Sequence[Event]) -> None:
        before = self._runs.get(run_id)
        if before is None and events[0].seq > 1:
            for event in await self._persist(lambda: self._store.read(log, 1, limit=10)):
                before = advance_run(before, run_id, event)
        run = before
        for event in events:
            run = advance_run(run, run_id, event)
            if isinstance(event.data, StepFinished):
                step, metrics = event.data.step, event.data.metrics
                await self._persist(
                    lambda step=step, metrics=metrics: self._store.put_metrics(
                        run_id, step, metrics
                    )
                )
        if run is not None and run.reason is not None:
            self._ended[log] = events[-1].seq
        if run is not None and run is not before:
            changed = run
            self._runs[run_id] = run
            await self._persist(lambda: self._store.put_run(changed))

    async def _persist(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do something with the store, again and again until it is there."""
        delay = FIRST_RETRY_S
        while True:
            try:
                result = await work()
            except LogRewoundError:
                raise
            except StoreError as error:
                self._trouble = error
                if self._outage is None:
                    self._outage = time.monotonic()
                    telemetry.STORE_OUTAGES.add()
                    logger.warning(
                        "the store fails; the run goes on, archiving waits for it: %s", error
                    )
                await anyio.sleep(delay)
                delay = min(delay * 2, LAST_RETRY_S)
            else:
                self._recovered()
                return result

    def _recovered(self) -> None:
        if self._outage is not None:
            seconds = time.monotonic() - self._outage
            logger.info("the store works again after %.1f s", seconds)
            self._outage = self._trouble = None


class LostEvents(BusError):
    """Events that the feed announced are neither on the bus nor in the store."""
