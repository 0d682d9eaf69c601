"""What a launcher says of a log that a server has lost."""

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path

import anyio
import pytest

from aworld_runtime.bus import Bus, open_bus
from aworld_runtime.bus.memory import MemoryBus
from aworld_runtime.bus.server import PrivateServer
from aworld_runtime.errors import RunLostError, StoreError
from aworld_runtime.events import Event, MessagePosted, Registry
from aworld_runtime.names import run_log
from aworld_runtime.store.sqlite import SQLiteStore
from aworld_runtime.training import log_of_run
from aworld_runtime.training.log_of_run import expect_in_store, expect_on_bus, follow
from tests.faults import restart_empty

pytestmark = pytest.mark.anyio
LOG = run_log("run")


@pytest.fixture
async def bus() -> AsyncIterator[MemoryBus]:
    async with MemoryBus("memory://", Registry()) as opened:
        yield opened


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SQLiteStore]:
    async with SQLiteStore(f"sqlite:///{tmp_path}/store.db", Registry()) as opened:
        yield opened


def notes(*texts: str) -> list[Event]:
    return [Event.of(MessagePosted(content=text), source="trainer/run") for text in texts]


async def test_a_log_that_is_lost_while_it_is_followed(
    bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_of_run, "PUT_BACK_S", 1.0)  # so long the test waits
    await bus.append(LOG, 0, notes("a", "b"))
    async with aclosing(follow(bus, LOG)) as events:
        assert [(await anext(events)).seq, (await anext(events)).seq] == [1, 2]
        await bus.append(LOG, 2, notes("c"))
        assert (await anext(events)).seq == 3
        await bus.unlink(LOG, keep_s=0)
        await bus.append(LOG, 0, notes("another a"))
        with pytest.raises(RunLostError, match=r"the bus has lost this run \(1 of 3 events\)"):
            await anext(events)


async def test_a_log_that_its_writer_puts_back_is_followed_further(tmp_path: Path) -> None:
    async with PrivateServer(tmp_path) as server, open_bus(server.url) as bus:
        await bus.append(LOG, 0, notes("a", "b"))
        known = await bus.read(LOG)
        async with aclosing(follow(bus, LOG)) as events:
            assert [(await anext(events)).seq, (await anext(events)).seq] == [1, 2]
            await restart_empty(server)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(put_back_later, bus, known)
                assert (await anext(events)).seq == 3


async def put_back_later(bus: Bus, known: Sequence[Event]) -> None:
    await anyio.sleep(2 * log_of_run.QUIET_S)
    await bus.append(LOG, 0, known)
    await bus.append(LOG, 2, notes("c"))


async def test_a_log_that_the_bus_lost_before_a_resume(bus: MemoryBus, store: SQLiteStore) -> None:
    await expect_on_bus(bus, store, LOG)  # nothing has happened yet
    events = notes("a", "b")
    await bus.append(LOG, 0, events)
    await store.put_events(LOG, await bus.read(LOG, limit=1))
    await expect_on_bus(bus, store, LOG)  # the archiver was late
    await store.put_events(LOG, await bus.read(LOG))
    await expect_on_bus(bus, store, LOG)
    await bus.unlink(LOG, keep_s=0)
    with pytest.raises(RunLostError, match=r"the bus has lost this run \(0 of 2 events\)"):
        await expect_on_bus(bus, store, LOG)
    await bus.append(LOG, 0, notes("x", "y", "z"))
    with pytest.raises(RunLostError, match="event 2 of its log is not the one in sqlite"):
        await expect_on_bus(bus, store, LOG)


async def test_a_store_that_was_emptied_at_the_end(bus: MemoryBus, store: SQLiteStore) -> None:
    await bus.append(LOG, 0, notes("a", "b"))
    await store.put_events(LOG, await bus.read(LOG, limit=1))
    with pytest.raises(StoreError, match="lacks the end of the run, event 2 of its log"):
        await expect_in_store(bus, store, LOG)
    await store.put_events(LOG, await bus.read(LOG))
    await expect_in_store(bus, store, LOG)
