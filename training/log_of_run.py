"""A run's log as its launcher follows it, and how it sees that a server has lost it for good.

The trainer puts it back, unless it died as well: then a bus without its data looks like a run that has yet to begin, and a
store whose file was removed like one in which nothing happened. Both would end well, with the wrong numbers.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

import anyio

from aworld_runtime.archive.logs import Logs
from aworld_runtime.bus.base import Bus
from aworld_runtime.errors import RunLostError, StoreError
from aworld_runtime.events import Event
from aworld_runtime.store.base import Store

QUIET_S = 1.0
"""Seconds without news after which a log is looked at: one that was lost brings none."""
PUT_BACK_S = 10.0
"""Seconds for a trainer to put back a log."""


async def follow(bus: Bus, log: str) -> AsyncGenerator[Event]:
    """The log's events, those that are there and those that come.

    Raises:
        RunLostError: the log has become shorter, and stays so.
    """
    seen, whole = 0, anyio.current_time()
    async with bus.tail(log) as events:
        while True:
            event = None
            with anyio.move_on_after(QUIET_S):
                event = await anext(events)
            if event is not None:
                seen, whole = event.seq, anyio.current_time()
                yield event
            elif (there := await bus.last_seq(log)) >= seen:
                whole = anyio.current_time()
            elif anyio.current_time() - whole > PUT_BACK_S:
                raise RunLostError(_lost(there, seen))


async def expect_on_bus(bus: Bus, store: Store, log: str) -> None:
    """The bus must hold what the store has of the log.

    Raises:
        RunLostError: it doesn't.
    """
    stored = await store.last_seq(log)
    if not stored:
        return
    there = await bus.last_seq(log)
    if there < stored:
        raise RunLostError(_lost(there, stored))
    if not await _same(bus, store, log, stored):
        raise RunLostError(
            f"the bus has lost this run: event {stored} of its log is not the one in {store.url}; start a new one"
        )


async def put_back_whole(bus: Bus, store: Store, log: str) -> None:
    """A run that had ended is resumed: of its log, once it was retired, the bus has the last event alone."""
    first = await bus.read(log, limit=1)
    if first and first[0].seq > 1:
        await bus.restore(log, await Logs(bus, store).read_all(log))


async def expect_in_store(bus: Bus, store: Store, log: str) -> None:
    """The store must hold the log to its end.

    Raises:
        StoreError: it doesn't.
    """
    last = await bus.last_seq(log)
    if not await _same(bus, store, log, last):
        raise StoreError(
            f"{store.url} lacks the end of the run, event {last} of its log: was it removed or replaced meanwhile?"
        )


async def _same(bus: Bus, store: Store, log: str, seq: int) -> bool:
    """Whether both hold the same event there, and so the same log until there."""
    on_bus, in_store = await bus.read(log, seq, limit=1), await store.read(log, seq, limit=1)
    return [event.id for event in on_bus] == [event.id for event in in_store]


def _lost(there: int, seen: int) -> str:
    return f"the bus has lost this run ({there} of {seen} events); start a new one"
