"""Reads logs and sends their spans.

    bus.feed ──▶ entries of episodes ──▶ read ──▶ one fold per log ──▶ spans ──▶ collector ──▶ the cursor moves

The cursor moves once the collector has what came before it. Who is killed in between sends the same spans again, with the
same ids, which a collector's store keeps once.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import anyio

from aworld_runtime import telemetry
from aworld_runtime.bus.base import Bus, FeedEntry, Readable
from aworld_runtime.errors import ConfigError, EventError, ExportError
from aworld_runtime.events import EpisodeFinished, EpisodeForked, Event
from aworld_runtime.forks import OwnEvents
from aworld_runtime.names import episode_of_log
from aworld_runtime.tracing.spans import Span, SpanFold

logger = logging.getLogger(__name__)

SPANS_AT_ONCE = 512
EVENTS_AT_ONCE = 1000
EPISODES_KNOWN = 10_000
"""Unfinished episodes whose fold is in memory; others are read again from their beginning."""
PATIENCE_S = 30.0
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0


class Sink(Protocol):
    """Where spans go."""

    endpoint: str

    async def send(self, spans: Sequence[Span]) -> None:
        """Returns once it has them.

        Raises:
            ExportError: it doesn't take them now; says why.
        """
        ...


class CursorFile:
    """How far an exporter has come, by collector and feed, in a small JSON file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, name: str) -> str | None:
        return self._all().get(name)

    def write(self, name: str, cursor: str) -> None:
        """Replaces the file as a whole: it is never half written."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        fresh.write_text(json.dumps(self._all() | {name: cursor}))
        fresh.replace(self._path)

    def _all(self) -> dict[str, str]:
        try:
            return json.loads(self._path.read_text())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise ConfigError(
                f"{self._path} is no file of cursors ({error}): name another with --cursor, or remove it"
            ) from error


@dataclass(slots=True)
class _Followed:
    """A log, and what is known of it."""

    fold: SpanFold
    own: OwnEvents
    following: int = 1
    """Seq of the next event."""
    finished: bool = False
    missing: int = 0
    """Events at its beginning that are nowhere to be read."""

    def add(self, events: Sequence[Event]) -> list[Span]:
        spans: list[Span] = []
        for event in self.own.among(events):
            if self.following == 1 and not isinstance(event.data, EpisodeForked):
                self.missing = event.seq - 1
            spans += self.fold.add(event)
            self.following = event.seq + 1
            self.finished = self.finished or isinstance(event.data, EpisodeFinished)
        self.following = events[-1].seq + 1 if events else self.following
        return spans


@dataclass
class Exporter:
    """Sends the spans of logs; `sent` counts them."""

    logs: Readable
    sink: Sink
    content: bool = False
    patience_s: float = PATIENCE_S
    """How long `export` waits for a collector that is away."""
    sent: int = 0
    _known: dict[str, _Followed] = field(default_factory=dict[str, _Followed])
    _refusal: ExportError | None = None
    """Why the sink does not take what is being sent."""

    async def export(self, log: str) -> None:
        """Send what has ended in an episode's log so far.

        Raises:
            ExportError: the collector does not take it.
        """
        followed = self._new(log)
        with anyio.move_on_after(self.patience_s) as patience:
            await self._send(await self._read(log, followed))
        if patience.cancelled_caught:
            why = self._refusal or "it does not answer"
            raise ExportError(
                f"collector {self.sink.endpoint} has not taken the spans of {log} for {self.patience_s:g} s: {why}. Is"
                " it there, and does it take OTLP over HTTP?"
            )
        self._expect_whole(log, followed)

    async def follow(self, bus: Bus, cursors: CursorFile) -> None:
        """Send the spans of all episodes as they end, from the cursor on; until cancelled."""
        name = f"{self.sink.endpoint} {await bus.feed_id()}"
        async with bus.feed(cursors.read(name) or "0") as feed:
            async for entries in feed:
                spans: list[Span] = []
                for entry in entries:
                    if episode_of_log(entry.log) is not None:
                        spans += await self._advance(entry)
                await self._send(spans)
                cursors.write(name, entries[-1].cursor)

    # inside

    def _new(self, log: str) -> _Followed:
        return _Followed(SpanFold(content=self.content), OwnEvents(log))

    async def _advance(self, entry: FeedEntry) -> list[Span]:
        """The spans that these events end. All that ended before them was sent before the cursor came here."""
        followed = self._known.pop(entry.log, None)
        try:
            if followed is None:
                followed = self._new(entry.log)
                await self._read(entry.log, followed, entry.first - 1)
            spans = await self._read(entry.log, followed, entry.last)
        except EventError as error:
            logger.error("no spans of %s from event %d on: %s", entry.log, entry.first, error)
            return []
        if followed.following <= entry.last:
            followed.missing = entry.last
        self._expect_whole(entry.log, followed)
        if not followed.finished:
            self._known[entry.log] = followed
            if len(self._known) > EPISODES_KNOWN:
                del self._known[next(iter(self._known))]
        return spans

    def _expect_whole(self, log: str, followed: _Followed) -> None:
        if followed.missing:
            logger.warning(
                "%s is no longer whole on the bus: name the store, too, with --store", log
            )
            followed.missing = 0

    async def _read(self, log: str, followed: _Followed, last: int | None = None) -> list[Span]:
        """Fold the log up to `last`; the spans that ended there."""
        spans: list[Span] = []
        while last is None or followed.following <= last:
            left = EVENTS_AT_ONCE if last is None else last - followed.following + 1
            limit = min(left, EVENTS_AT_ONCE)
            events = await self.logs.read(log, followed.following, limit=limit)
            if not events:
                break
            spans += followed.add([e for e in events if last is None or e.seq <= last])
            if events[-1].seq >= (last or events[-1].seq + 1):
                break
        return spans

    async def _send(self, spans: Sequence[Span]) -> None:
        """Send, again and again until the collector has it."""
        for begin in range(0, len(spans), SPANS_AT_ONCE):
            batch = spans[begin : begin + SPANS_AT_ONCE]
            pause_s = FIRST_PAUSE_S
            while not await self._taken(batch):
                if pause_s == FIRST_PAUSE_S:
                    logger.warning(
                        "collector %s does not take spans yet: %s. They are sent again until it does",
                        self.sink.endpoint,
                        self._refusal,
                    )
                await anyio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            telemetry.SPANS.add(len(batch))
            self.sent += len(batch)

    async def _taken(self, batch: Sequence[Span]) -> bool:
        try:
            await self.sink.send(batch)
        except ExportError as error:
            self._refusal = error
            telemetry.SPANS_REFUSED.add(len(batch))
        else:
            self._refusal = None
        return self._refusal is None
