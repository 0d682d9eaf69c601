"""The bus's housekeeping, beside an archiver: what is in the store, and over, goes; what the server lost comes back.

    archiver: these logs have ended ──▶ wait a little ──▶ still ended, and all in the store? ──▶ retire
    every second: trim the feed behind whoever follows it, and behind the logs that wait to be retired
    the feed is another ──▶ owners have put back what they know ──▶ restore what is missing, queue its requests again

Each step may be done twice, and by several janitors: a log is retired where its last event is as expected, restored where
it is empty, and `log.restored` has its place. Nothing is kept for each episode but for those that have just ended.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import takewhile

import anyio

from aworld_runtime import telemetry
from aworld_runtime.archive.archiver import Archiver
from aworld_runtime.archive.lost import after_loss, begins, put_back, say_restored
from aworld_runtime.bus.base import Bus, read_own, read_shared
from aworld_runtime.bus.room import when_there_is_room
from aworld_runtime.errors import (
    AWorldError,
    BusError,
    BusFullError,
    EventError,
    Fenced,
    MissingParentError,
    StoreError,
    first_error,
)
from aworld_runtime.events import (
    EpisodeFinished,
    Event,
    RunFinished,
)
from aworld_runtime.forks import Origin
from aworld_runtime.names import EPISODES_QUEUE, episode_log
from aworld_runtime.store.base import BusRecord, Store

logger = logging.getLogger(__name__)

EVERY_S = 1.0
QUIET_S = 1.0
"""A feed that says nothing for so long has been read to its end."""
PAGE = 256
LOGS_AT_ONCE = 32
FEEDS_KNOWN = 10
SEEN_RECENTLY = timedelta(minutes=10)
"""A server that lost its data is back sooner; later, another one may have its address."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A log that waits to be retired."""

    last: int
    """Its last seq: if it has another by then, it goes on."""
    due: float
    before: str
    """A cursor before its end."""


class Janitor:
    """Works while `run` does. `archiver` tells it what has ended, and how far the store is.

    `retire_after_s` and `restore_after_s` are as in `Settings`. `keep` says of a log whether somebody still needs it.
    """

    def __init__(
        self,
        bus: Bus,
        store: Store,
        archiver: Archiver,
        *,
        retire_after_s: float,
        restore_after_s: float,
        keep: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self.name = "janitor"
        self.incidents: dict[str, AWorldError] = {}
        """Logs that could not be restored, and why."""
        self._bus = bus
        self._store = store
        self._archiver = archiver
        self._retire_after_s = retire_after_s
        self._restore_after_s = restore_after_s
        self._keep = keep
        self._feed_id: str | None = None
        self._ended: dict[str, Ended] = {}
        """By time, so by cursor, too."""
        self._marked: str | None = None
        """The cursor from which the next janitor looks for logs that have ended."""
        self._trimmed: tuple[str, ...] = ()
        self._feeds: list[str] = []
        """Those that this bus has had, the newest last."""
        self._lost: list[str] = []
        """Feeds whose server has lost them, and whose episodes are yet to be restored."""
        self._noticed = bus.now()
        self._written = datetime.min.replace(tzinfo=UTC)
        self._source = f"{self.name}/{archiver.name}"
        self._beginnings: set[str] = set()
        """Logs of which somebody put back less than the store has."""
        self._any_beginning = anyio.Event()
        archiver.listeners.append(self._note)
        archiver.told_of_beginnings.append(self._note_beginning)

    async def run(self) -> None:
        """Until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._complete)
            await self._keep_house()

    async def _keep_house(self) -> None:
        trouble = False
        while True:
            try:
                await self._work()
                trouble = False
            except* (
                StoreError,
                BusFullError,
            ) as failed:  # a full disk refuses to free anything, too
                if not trouble:
                    logger.warning("housekeeping waits: %s", first_error(failed))
                trouble = True
            await anyio.sleep(EVERY_S)

    async def _work(self) -> None:
        feed_id = self._archiver.feed_id
        if feed_id is None:
            return
        if feed_id != self._feed_id:
            await self._begin(feed_id)
        if self._lost and self._bus.now() - self._noticed > timedelta(
            seconds=self._restore_after_s
        ):
            await self._restore_all(feed_id)
        await self._write_down()
        await self._retire_due()
        await self._trim(feed_id)

    def _note(self, ended: Mapping[str, int], before: str) -> None:
        for log in ended:
            self._ended.pop(log, None)  # one that goes on, and ends again, waits again
        self._ended |= self._waiting(ended, before)

    def _note_beginning(self, log: str) -> None:
        self._beginnings.add(log)
        self._any_beginning.set()

    def _waiting(self, ended: Mapping[str, int], before: str) -> dict[str, Ended]:
        due = time.monotonic() + self._retire_after_s
        return {log: Ended(last, due, before) for log, last in ended.items()}

    async def _begin(self, feed_id: str) -> None:
        """On a feed that it does not know yet: what has ended there, and was not retired by the last janitor."""
        if self._feed_id is None and not self._feeds:
            await self._recall()
            self._noticed = self._bus.now()
        if self._feeds and feed_id not in self._feeds:
            # The earlier ones, too: what was restored last time may not have been archived since.
            self._lost = list(self._feeds)
            self._noticed = self._bus.now()
            self._ended.clear()
            self._feed_id = None
        if feed_id not in self._feeds[-1:]:
            earlier = [known for known in self._feeds if known != feed_id]
            self._feeds = [*earlier[-FEEDS_KNOWN:], feed_id]
            await self._write_down(now=True)
        found: dict[str, Ended] = {}
        end = self._archiver.cursor
        after = self._marked = await self._store.cursor(f"{self.name}@{feed_id}") or "0"
        async with self._bus.feed(after) as feed:
            while after != end:
                entries = None
                with anyio.move_on_after(QUIET_S):
                    entries = await anext(feed)
                if entries is None:
                    break
                before, after = after, entries[-1].cursor
                if any(entry.cursor == end for entry in entries):
                    after = end
                logs = {entry.log for entry in entries}
                ended = {log: last for log in logs if (last := await self._end(log))}
                found |= self._waiting(ended, before)
        self._ended = found | self._ended
        self._feed_id = feed_id

    async def _recall(self) -> None:
        """What another janitor of this bus knew a short while ago: it may have died with the server's data."""
        record = await self._store.bus(self._bus.url)
        if record is not None and self._bus.now() - record.seen <= SEEN_RECENTLY:
            self._feeds, self._lost = list(record.feeds), list(record.lost)

    async def _write_down(self, *, now: bool = False) -> None:
        """For the next janitor. What is inside one process needs none: it ends with the process."""
        time = self._bus.now()
        due = now or time - self._written >= SEEN_RECENTLY / 10
        if due and not self._bus.url.startswith("memory:"):
            feeds, lost = tuple(self._feeds), tuple(self._lost)
            await self._store.put_bus(
                BusRecord(url=self._bus.url, feeds=feeds, lost=lost, seen=time)
            )
            self._written = time

    async def _end(self, log: str) -> int:
        """Seq of the event that ended it, the last on the bus and in the store; 0 where there is none."""
        last = await self._bus.last_seq(log)
        there = await self._bus.read(log, last, limit=1) if last else []
        if not there or not isinstance(there[0].data, EpisodeFinished | RunFinished):
            return 0
        kept = await self._store.read(log, last, limit=1)
        return last if [event.id for event in kept] == [there[0].id] else 0

    # --- what goes -------------------------------------------------------------------------------------------------

    async def _retire_due(self) -> None:
        now = time.monotonic()
        due = list(takewhile(lambda item: item[1].due <= now, self._ended.items()))
        due = [(log, ended) for log, ended in due if not self._keep(log)]
        for start in range(0, len(due), LOGS_AT_ONCE):
            some = due[start : start + LOGS_AT_ONCE]
            async with anyio.create_task_group() as group:
                for log, ended in some:
                    if log not in self._archiver.incidents:
                        group.start_soon(partial(self._bus.unlink, log, last=ended.last))
            for log, ended in some:
                if self._ended.get(log) is ended:
                    del self._ended[log]
                telemetry.RETIRED.add(log not in self._archiver.incidents)

    async def _trim(self, feed_id: str) -> None:
        """Forget what all have read. The next janitor begins before the first log that waits to be retired."""
        archived = self._archiver.cursor
        mine = next((ended.before for ended in self._ended.values()), archived)
        if mine != self._marked:
            await self._store.set_cursor(f"{self.name}@{feed_id}", mine)
            self._marked = mine
        cursors = (mine, archived, *await self._announced(feed_id))
        if cursors != self._trimmed:
            await self._bus.trim_feed(*cursors)
            self._trimmed = cursors
            telemetry.TRIMS.add()

    async def _announced(self, feed_id: str) -> list[str]:
        """How far each has read that says so, such as archivers of other stores."""
        details = [node.detail for node in await self._bus.nodes()]
        return [str(d["cursor"]) for d in details if d.get("feed") == feed_id and "cursor" in d]

    # --- what comes back -------------------------------------------------------------------------------------------

    async def _complete(self) -> None:
        """Before anybody goes on with a log of which more is known: an owner that had been stopped, and taken over since, puts
        back what it knows as soon as it is back. The episode may even have ended.
        """
        while True:
            await self._any_beginning.wait()
            self._any_beginning = anyio.Event()
            while self._beginnings:
                log = self._beginnings.pop()
                try:
                    await self._restore_or_say_why(log)
                except (StoreError, BusFullError) as failed:
                    logger.warning("%s is not completed yet: %s", log, failed)
                    self._beginnings.add(log)
                    await anyio.sleep(EVERY_S)

    async def _restore_all(self, feed_id: str) -> None:
        """What had begun on the feeds that are lost; and what was put back, and archived, since."""
        while self._lost:
            async for log in self._unfinished(self._lost[0]):
                await self._restore_or_say_why(log)
            del self._lost[0]
        async for log in self._unfinished(feed_id):
            await self._queue_if_abandoned(log, await self._bus.last_seq(log))
        await self._write_down(now=True)

    async def _unfinished(self, feed_id: str) -> AsyncGenerator[str]:
        """The logs of episodes that had no end when they were last archived from this feed."""
        after = ""
        while page := await self._store.unfinished(feed_id, after=after, limit=PAGE):
            for record in page:
                yield episode_log(record.id)
            after = page[-1].id

    async def _restore_or_say_why(self, log: str) -> None:
        try:
            await self._restore(log)
        except Fenced:
            logger.info("%s: somebody else goes on with it", log)
        except (EventError, LostLogError) as error:
            self.incidents[log] = error
            telemetry.LOST_LOGS.add()
            logger.error("%s is lost: %s", log, error)

    async def _restore(self, log: str) -> None:
        """Make the log on the bus what the store has of it, say so in the log, and have the episode go on.

        Raises:
            Fenced: somebody else writes to it.
            LostLogError: bus and store hold two histories, or the store's has a hole.
        """
        there, kept = await self._bus.last_seq(log), await self._store.last_seq(log)
        if there >= kept:  # its owner has put it back, or a janitor
            await self._queue_if_abandoned(log, there)
            return
        events = await self._stored(log)
        if not await begins(self._bus, log, there, events):
            raise LostLogError(
                f"event {there} on the bus is not the one in {self._store.url}: it began anew before it could be"
                " restored; aworld verify shows both"
            )
        restored = await put_back(self._bus, log, events)
        # Where only its record in the store was behind, nothing follows an end.
        if not restored or isinstance(events[-1].data, EpisodeFinished):
            return
        requested = Origin.of(events).requested or events[0]
        if await say_restored(self._bus, log, kept, requested, source=self._source):
            telemetry.RESTORED.add()
            logger.warning("%s: restored from the store up to event %d", log, kept)
            await self._queue(log, events)

    async def _queue(self, log: str, events: Sequence[Event]) -> None:
        """Have somebody claim the episode. One that can't be run from its log ends here."""
        first, requested = events[0], Origin.of(events).requested
        if requested is not None and first.seq == 1:
            await self._send(partial(self._bus.put, EPISODES_QUEUE, requested), log)
            return
        lost = f"the bus lost this episode, and its log begins with {first.type}: nobody can run it"
        failed = first.caused(EpisodeFinished(reason="failed", error=lost), source=self._source)
        await self._send(
            partial(self._bus.append, log, await self._bus.last_seq(log), [failed]), log
        )

    async def _stored(self, log: str) -> list[Event]:
        """The log; after what it shares with the one that it was forked from, if that is there."""
        events = await read_own(self._store, log)
        if events[-1].seq - events[0].seq != len(events) - 1:
            raise LostLogError(f"{self._store.url} lacks events between its first and its last one")
        with suppress(MissingParentError):
            events = [*await read_shared(self._store, events[0]), *events]
        return events

    async def _queue_if_abandoned(self, log: str, last: int) -> None:
        """Whoever puts a log back queues its request, too; unless he dies between the two. `last` is its last seq."""
        newest = await self._bus.read(log, last, limit=1) if last else []
        if not newest or isinstance(newest[0].data, EpisodeFinished):
            return
        if newest[0].time < self._noticed:
            logger.warning("%s: nobody has claimed it since the server lost it; queued again", log)
            if events := await read_own(self._bus, log):
                await self._queue(log, [after_loss(event) for event in events])

    async def _send(self, send: Callable[[], Awaitable[object]], log: str) -> None:
        await when_there_is_room(send, who=f"{self.name}: {log}")


class LostLogError(BusError):
    """A log that the server lost and that can't be restored."""
