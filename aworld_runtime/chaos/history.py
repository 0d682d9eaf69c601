"""What a client of the bus saw, written by itself: a line before each call and one after it.

A call without a second line, because its process was killed or the bus stayed away, is `unknown`: it may have happened
or not. What was acknowledged is `ok`, what was refused `fail`. Lines go to the kernel one by one, so that kill -9 loses
none; times are of the machine's monotonic clock, the same in all processes.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, cast

from aworld_runtime.bus.base import Bus, Consumer, Delivery, Mail
from aworld_runtime.errors import BusFullError, EventError, Fenced
from aworld_runtime.events import Event, Registry
from aworld_runtime.names import episode_log

REFUSALS = (Fenced, BusFullError, EventError)
"""Errors after which nothing has happened."""
Outcome = Literal["ok", "fail", "unknown"]


@dataclass(slots=True)
class Operation:
    """One call, as its caller knows it."""

    process: str
    call: str
    """append, mail, put or take."""
    target: str
    """The log or the queue."""
    began: float
    ids: list[str]
    bodies: list[int]
    """A checksum of each event; none for what was taken."""
    types: list[str]
    episodes: list[str]
    """Which episode each event belongs to; none for an append."""
    after: int = 0
    """The expected seq of an append."""
    ended: float | None = None
    outcome: Outcome = "unknown"
    error: str = ""


class History:
    """Appends to one process's file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._calls = 0
        self._registry = Registry()

    @asynccontextmanager
    async def call(
        self, call: str, target: str, events: Sequence[Event], *, after: int = 0
    ) -> AsyncGenerator[None]:
        """The call is what happens inside."""
        self._calls += 1
        number = self._calls
        rows = [
            [e.id, checksum(self._registry, e), e.type, "" if call == "append" else e.episode_id]
            for e in events
        ]
        self._write(n=number, do=call, on=target, after=after, events=rows)
        try:
            yield
        except REFUSALS as error:
            self._write(n=number, end="fail", error=f"{type(error).__name__}: {error}")
            raise
        except Exception as error:
            self._write(n=number, end="unknown", error=f"{type(error).__name__}: {error}")
            raise
        self._write(n=number, end="ok")

    def taken(self, queue: str, events: Iterable[Event]) -> None:
        """Note deliveries; that is no call, for nobody waits for its outcome."""
        self._calls += 1
        seen = [[event.id, 0, event.type, event.episode_id] for event in events]
        self._write(n=self._calls, do="take", on=queue, after=0, events=seen)

    def _write(self, **line: Any) -> None:
        text = json.dumps({"t": round(time.monotonic(), 4), **line}, separators=(",", ":"))
        os.write(self._file, text.encode() + b"\n")


def checksum(registry: Registry, event: Event) -> int:
    """Of the event as it is stored, without its seq; what can't be stored has none."""
    try:
        return zlib.crc32(registry.encode(event))
    except EventError:
        return 0


class HistoryReader:
    """Reads a process's file, as far as it has been written."""

    def __init__(self, path: Path) -> None:
        self.process = path.stem
        self.operations: dict[int, Operation] = {}
        self._path = path
        self._offset = 0

    def read(self) -> None:
        """Go on where it stopped. A line that is cut was being written as its process died."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                self._add(json.loads(line))

    def _add(self, line: dict[str, Any]) -> None:
        if "do" in line:
            rows = line["events"]
            ids, bodies, types, episodes = zip(*rows, strict=True) if rows else ((), (), (), ())
            self.operations[line["n"]] = Operation(
                process=self.process,
                call=line["do"],
                target=line["on"],
                began=line["t"],
                ids=list(ids),
                bodies=list(bodies),
                types=list(types),
                episodes=list(episodes),
                after=line["after"],
            )
        else:
            operation = self.operations[line["n"]]
            operation.ended = line["t"]
            operation.outcome = line["end"]
            operation.error = line.get("error", "")


class RecordedBus:
    """An open bus whose appends, mail, queue entries and deliveries are written down; all else passes through."""

    def __init__(self, bus: Bus, history: History) -> None:
        self._bus = bus
        self._history = history

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    async def append(
        self,
        log: str,
        expected_seq: int,
        events: Sequence[Event],
        *,
        acks: Sequence[Mail] = (),
        feed_id: str | None = None,
    ) -> int:
        async with self._history.call("append", log, events, after=expected_seq):
            return await self._bus.append(log, expected_seq, events, acks=acks, feed_id=feed_id)

    async def send_mail(self, log: str, *events: Event) -> None:
        async with self._history.call("mail", log, events):
            await self._bus.send_mail(log, *events)

    async def put(self, queue: str, *events: Event, at: datetime | None = None) -> None:
        async with self._history.call("put", queue, events):
            await self._bus.put(queue, *events, at=at)

    async def reply(self, request: Event, answer: Event) -> None:
        if request.episode_id is not None:
            await self.send_mail(episode_log(request.episode_id), answer)
        else:
            await self._bus.reply(request, answer)

    @asynccontextmanager
    async def consume(self, queue: str, **options: Any) -> AsyncGenerator[Consumer]:
        async with self._bus.consume(queue, **options) as consumer:
            yield cast("Consumer", _RecordedConsumer(consumer, queue, self._history))


class _RecordedConsumer:
    def __init__(self, consumer: Consumer, queue: str, history: History) -> None:
        self._consumer = consumer
        self._queue = queue
        self._history = history

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)

    async def take(self) -> Delivery:
        delivery = await self._consumer.take()
        self._history.taken(self._queue, [delivery.event])
        return delivery

    async def take_many(self, at_most: int) -> Sequence[Delivery]:
        deliveries = await self._consumer.take_many(at_most)
        self._history.taken(self._queue, [delivery.event for delivery in deliveries])
        return deliveries


def recorded(bus: Bus, history: History) -> Bus:
    """The bus, with what is done to it written down."""
    return cast("Bus", RecordedBus(bus, history))
