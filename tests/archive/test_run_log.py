"""A run's log that the server lost: what its writer keeps in memory goes back, after what the store has."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from aworld_runtime.archive import run_log
from aworld_runtime.archive.run_log import RunLog
from aworld_runtime.bus import Bus, open_bus
from aworld_runtime.bus.base import read_all
from aworld_runtime.errors import BusError, Fenced
from aworld_runtime.events import Event, MessagePosted
from aworld_runtime.store import Store, open_store

pytestmark = pytest.mark.anyio


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    async with open_bus("memory://") as bus:
        yield bus


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store(f"sqlite:///{tmp_path}/store.db") as store:
        yield store


@pytest.fixture(autouse=True)
def _few_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit, nothing else: else each test would need a log of more than a thousand events."""
    monkeypatch.setattr(run_log, "KNOWN", 3)


def notes(*texts: str) -> list[Event]:
    return [Event.of(MessagePosted(content=text), source="writer/1") for text in texts]


async def lose(bus: Bus, log: RunLog) -> Sequence[Event]:
    """What it held."""
    events = await read_all(bus, log.name)
    await bus.unlink(log.name, keep_s=0)
    return events


async def test_an_append_to_a_lost_log_puts_it_back_first(bus: Bus, store: Store) -> None:
    log = RunLog(bus, store, "r")
    await log.append(notes("a", "b"))
    before = await lose(bus, log)
    appended = await log.append(notes("c"))
    assert [event.seq for event in appended] == [3]
    assert await read_all(bus, log.name) == [*before, *appended]


async def test_what_is_no_longer_in_memory_comes_from_the_store(bus: Bus, store: Store) -> None:
    log = RunLog(bus, store, "r")
    await log.append(notes("a", "b", "c", "d", "e"))
    before = await lose(bus, log)
    await store.put_events(log.name, before[:3])
    appended = await log.append(notes("f"))
    assert await read_all(bus, log.name) == [*before, *appended]


async def test_a_log_that_nobody_knows_all_of_is_lost(bus: Bus, store: Store) -> None:
    log = RunLog(bus, store, "r")
    await log.append(notes("a", "b", "c", "d", "e"))
    before = await lose(bus, log)
    await store.put_events(log.name, before[:1])
    with pytest.raises(BusError, match=r"bus lost run:r, and the store has 1 of its first 2"):
        await log.append(notes("f"))


async def test_a_log_is_gone_on_with_by_another_writer_and_the_first_is_refused(
    bus: Bus, store: Store
) -> None:
    first, second = RunLog(bus, store, "r"), RunLog(bus, store, "r")
    begun = await first.append(notes("a", "b"))
    assert await second.resume() == begun
    await second.append(notes("c"))
    with pytest.raises(Fenced):
        await first.append(notes("d"))
    before = await lose(bus, second)
    appended = await second.append(notes("e"))
    assert await read_all(bus, second.name) == [*before, *appended]
