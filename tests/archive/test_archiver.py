"""The archiver: every event into the store once, whatever happens to it or to the store."""

import logging
import sqlite3
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import anyio
import pytest
from anyio.lowlevel import checkpoint

from aworld_runtime.archive.archiver import Archiver
from aworld_runtime.archive.logs import Logs, Patient
from aworld_runtime.archive.verify import compare
from aworld_runtime.bus.memory import MemoryBus
from aworld_runtime.errors import LogRewoundError, StoreUnavailableError
from aworld_runtime.events import (
    EpisodeFinished,
    EpisodeRequested,
    EpisodeTakenOver,
    Event,
    EventData,
    MessagePosted,
    ModelCompleted,
    Registry,
    RewardGiven,
    RunFinished,
    RunStarted,
    StepFinished,
    new_id,
)
from aworld_runtime.messages import Task, Usage
from aworld_runtime.names import episode_log, run_log
from aworld_runtime.store import Store
from aworld_runtime.store import sqlite as sqlite_backend
from aworld_runtime.store.sqlite import SQLiteStore
from tests.services import MongoServer, pymongo_sockets_collected


@pytest.fixture
async def bus() -> AsyncIterator[MemoryBus]:
    async with MemoryBus("memory://", Registry()) as opened:
        yield opened


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


@pytest.fixture
async def store(file: Path) -> AsyncIterator[SQLiteStore]:
    async with SQLiteStore(f"sqlite:///{file}", Registry()) as opened:
        yield opened


def events(*data: EventData, episode_id: str | None = None) -> list[Event]:
    return [Event.of(d, source="solver/1", episode_id=episode_id, run_id="run") for d in data]


async def append(bus: MemoryBus, log: str, *data: EventData) -> None:
    await bus.append(log, await bus.last_seq(log), events(*data))


async def same(bus: MemoryBus, store: Store, log: str) -> None:
    on_bus = await bus.read(log)
    assert on_bus
    assert await store.read(log) == on_bus


def hello(count: int) -> Sequence[EventData]:
    return [MessagePosted(content=f"hello {i}") for i in range(count)]


async def test_everything_appended_is_archived(bus: MemoryBus, store: SQLiteStore) -> None:
    await append(bus, "episode:before", *hello(3))
    async with Archiver(bus, store) as archiver:
        for i in range(200):
            await append(bus, f"episode:{i % 20}", *hello(2))
        await append(bus, "other", *hello(700))
        await archiver.drain()
        for log in ("episode:before", *(f"episode:{i}" for i in range(20)), "other"):
            await same(bus, store, log)
    comparison = await compare(bus, store)
    assert comparison.same
    assert (comparison.logs, comparison.events) == (22, 1103)


async def test_an_archiver_says_that_it_is_there_until_it_leaves(
    bus: MemoryBus, store: SQLiteStore
) -> None:
    async with Archiver(bus, store) as archiver:
        await append(bus, "episode:1", *hello(3))
        await archiver.drain()
        (node,) = await bus.nodes()
        assert (node.role, node.kind) == ("archiver", "archiver")
        assert node.behind_s is not None
    assert await bus.nodes() == []


async def test_draining_leaves_nothing_behind(bus: MemoryBus, store: SQLiteStore) -> None:
    async with Archiver(bus, store) as archiver:
        await archiver.drain()
        await archiver.drain()
    assert await store.logs() == []
    assert bus._logs == {}  # pyright: ignore[reportPrivateUsage]


async def test_drain_without_an_archiver_says_so(bus: MemoryBus, store: SQLiteStore) -> None:
    with pytest.raises(StoreUnavailableError, match="does not run"):
        await Archiver(bus, store).drain(0.05)


async def test_restarted_archiver_resumes_at_its_cursor(
    bus: MemoryBus, store: SQLiteStore, tmp_path: Path
) -> None:
    """Shown with a store that knows the cursor and nothing else."""
    async with Archiver(bus, store) as archiver:
        await append(bus, "episode:1", *hello(3))
        await archiver.drain()
    follower = f"archiver@{await bus.feed_id()}"
    cursor = await store.cursor(follower)
    assert cursor is not None
    async with SQLiteStore(f"sqlite:///{tmp_path}/other.db", Registry()) as other:
        await other.set_cursor(follower, cursor)
        async with Archiver(bus, other) as archiver:
            await append(bus, "episode:2", *hello(3))
            await archiver.drain()
        assert await other.logs() == ["episode:2"]


async def test_of_a_log_that_goes_on_a_late_store_gets_the_beginning_too(
    bus: MemoryBus, store: SQLiteStore
) -> None:
    """The feed has been trimmed behind the archiver of another store, and tells of its end alone."""
    await append(bus, "episode:1", *hello(3))
    await append(bus, "other", *hello(1))
    async with bus.feed() as feed:
        told = await anext(feed)
    await bus.trim_feed(told[-1].cursor)
    await append(bus, "episode:1", *hello(2))
    async with Archiver(bus, store) as archiver:
        await archiver.drain()
    await same(bus, store, "episode:1")
    record = await store.episode("1")
    assert record is not None
    assert record.last_seq == 5


class DiesBefore(SQLiteStore):
    """A store under which the archiver's process dies just before it calls `method`."""

    def __init__(self, url: str, method: str) -> None:
        super().__init__(url, Registry())
        self.method = method
        self.reached = anyio.Event()

    def __getattribute__(self, name: str) -> object:
        if name == object.__getattribute__(self, "__dict__").get("method"):
            return object.__getattribute__(self, "_die")
        return object.__getattribute__(self, name)

    async def _die(self, *_: object) -> None:
        self.reached.set()
        await anyio.sleep_forever()


@pytest.mark.parametrize("method", ["put_events", "put_episode", "set_cursor"])
async def test_death_between_two_writes_loses_and_doubles_nothing(
    bus: MemoryBus, store: SQLiteStore, method: str
) -> None:
    log = episode_log("one")
    task = Task(id="t", prompt="1 + 1?")
    async with Archiver(bus, store) as archiver:
        await append(bus, log, EpisodeRequested(task=task, program="p:q"), ModelCompleted())
        await archiver.drain()
    async with DiesBefore(store.url, method) as dying, Archiver(bus, dying):
        await append(bus, log, ModelCompleted(), ModelCompleted())
        await dying.reached.wait()
    async with Archiver(bus, store) as archiver:
        await append(bus, log, ModelCompleted(), EpisodeFinished(answer="2"))
        await archiver.drain()
    await same(bus, store, log)
    episode = await store.episode("one")
    assert episode is not None
    assert (episode.turns, episode.status, episode.last_seq) == (4, "answered", 6)
    assert episode.task_id == "t"


async def test_an_episode_has_a_record_before_it_has_events(
    bus: MemoryBus, store: SQLiteStore
) -> None:
    """A janitor finds by it what a server lost whose archiver died in between."""
    task = Task(id="t", prompt="1 + 1?")
    async with DiesBefore(store.url, "put_events") as dying, Archiver(bus, dying) as archiver:
        await append(bus, episode_log("one"), EpisodeRequested(task=task, program="p:q"))
        await dying.reached.wait()
        (record,) = await store.unfinished(archiver.feed_id or "")
    assert (record.id, record.task_id) == ("one", "t")


async def test_two_archivers_at_once_are_one(bus: MemoryBus, store: SQLiteStore) -> None:
    async with (
        SQLiteStore(store.url, Registry()) as second,
        Archiver(bus, store) as one,
        Archiver(bus, second) as other,
    ):
        for i in range(50):
            await append(bus, f"episode:{i % 5}", *hello(2))
            await checkpoint()
        await one.drain()
        await other.drain()
        assert one.incidents == other.incidents == {}
    for i in range(5):
        await same(bus, store, f"episode:{i}")


async def test_store_outage_stalls_nobody_and_loses_nothing(
    bus: MemoryBus,
    store: SQLiteStore,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Another program holds the file's write lock for longer than the store waits."""
    monkeypatch.setattr(sqlite_backend, "BUSY_S", 0.05)
    async with (
        SQLiteStore(store.url, Registry()) as impatient,
        Archiver(bus, impatient) as archiver,
    ):
        other = sqlite3.connect(file, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with caplog.at_level(logging.INFO, "aworld_runtime.archive.archiver"):
            with anyio.fail_after(1):
                for i in range(300):
                    await append(bus, f"episode:{i % 10}", MessagePosted(content="hello"))
            with pytest.raises(StoreUnavailableError, match="another process"):
                await archiver.drain(0.6)
            assert [r.levelname for r in caplog.records] == ["WARNING"]
            other.execute("ROLLBACK")
            other.close()
            await archiver.drain()
            assert [r.levelname for r in caplog.records] == ["WARNING", "INFO"]
        for i in range(10):
            await same(bus, store, f"episode:{i}")


@pytest.mark.chaos
async def test_killed_database_server_is_waited_for(bus: MemoryBus, tmp_path: Path) -> None:
    pytest.importorskip("pymongo")
    with pymongo_sockets_collected():
        await _kill_and_restart(bus, tmp_path)


async def _kill_and_restart(bus: MemoryBus, folder: Path) -> None:
    from aworld_runtime.store.mongo import MongoStore

    async with MongoServer(folder) as server, MongoStore(server.url, Registry()) as store:
        async with Archiver(bus, store) as archiver:
            await append(bus, "episode:1", *hello(100))
            await archiver.drain()
            await server.kill()
            await append(bus, "episode:1", *hello(100))
            await append(bus, "episode:2", *hello(100))
            with pytest.raises(StoreUnavailableError, match="archived"):
                await archiver.drain(0.2)
            await server.start()
            await archiver.drain()
        assert (await compare(bus, store)).same
        await same(bus, store, "episode:1")


async def test_who_is_patient_reads_once_a_killed_database_is_back(
    bus: MemoryBus, tmp_path: Path
) -> None:
    pytest.importorskip("pymongo")
    from aworld_runtime.store.mongo import MongoStore

    async with MongoServer(tmp_path) as server, MongoStore(server.url, Registry()) as store:
        await store.put_events("episode:1", [e.at(n) for n, e in enumerate(events(*hello(3)), 1)])
        await server.kill()
        found: list[int] = []

        async def ask() -> None:
            found.append(await Logs(bus, Patient(store)).last_seq("episode:1"))

        with pymongo_sockets_collected():
            async with anyio.create_task_group() as tasks:
                with pytest.raises(StoreUnavailableError):
                    await Logs(bus, store).last_seq("episode:1")
                tasks.start_soon(ask)
                await server.start()
        assert found == [3]


async def test_rewound_log_is_an_incident_and_the_others_go_on(
    bus: MemoryBus, store: SQLiteStore, caplog: pytest.LogCaptureFixture
) -> None:
    kept = [event.at(seq) for seq, event in enumerate(events(*hello(3)), 1)]
    await store.put_events("episode:1", kept)
    async with Archiver(bus, store) as archiver:
        await append(bus, "episode:1", *hello(1))
        await append(bus, "episode:2", *hello(2))
        await archiver.drain()
        await append(bus, "episode:1", *hello(2))
        await archiver.drain()
        assert isinstance(archiver.incidents["episode:1"], LogRewoundError)
    assert await store.read("episode:1") == kept
    await same(bus, store, "episode:2")
    assert [r.levelname for r in caplog.records] == ["ERROR"]
    comparison = await compare(bus, store, "episode:1")
    assert comparison.differing == 3
    assert comparison.differences[0].in_store == kept[0].id


async def test_rewound_log_is_not_continued_by_the_next_archiver(
    bus: MemoryBus, store: SQLiteStore
) -> None:
    kept = [event.at(seq) for seq, event in enumerate(events(*hello(3)), 1)]
    await store.put_events("episode:1", kept)
    await append(bus, "episode:1", *hello(3))
    async with Archiver(bus, store) as archiver:
        await archiver.drain()
    async with Archiver(bus, store) as archiver:
        await append(bus, "episode:1", *hello(2))
        await archiver.drain()
        assert isinstance(archiver.incidents["episode:1"], LogRewoundError)
    assert await store.read("episode:1") == kept


async def test_log_that_vanished_unarchived_is_an_incident(
    bus: MemoryBus, store: SQLiteStore, caplog: pytest.LogCaptureFixture
) -> None:
    await append(bus, "episode:1", *hello(3))
    await bus.unlink("episode:1")
    async with Archiver(bus, store) as archiver:
        await archiver.drain()
        assert "no longer on the bus" in str(archiver.incidents["episode:1"])
    assert [r.levelname for r in caplog.records] == ["ERROR"]


async def test_error_of_the_caller_comes_through_as_it_is(
    bus: MemoryBus, store: SQLiteStore
) -> None:
    with pytest.raises(KeyError):
        async with Archiver(bus, store):
            raise KeyError


# --- records -------------------------------------------------------------------------------------------------------


async def test_episode_record_is_the_fold_of_its_log(bus: MemoryBus, store: SQLiteStore) -> None:
    task = Task(id="t", prompt="1 + 1?")
    usage = Usage(prompt_tokens=10, completion_tokens=2)
    first = events(EpisodeRequested(task=task, program="p:q", index=3), ModelCompleted(usage=usage))
    rest = events(
        EpisodeTakenOver(worker="w2"),
        ModelCompleted(usage=usage),
        RewardGiven(reward=0.5),
        RewardGiven(role="solver", reward=0.1),
        EpisodeFinished(answer="2", reason="turn_limit"),
    )
    async with Archiver(bus, store) as archiver:
        await bus.append(episode_log("one"), 0, first)
        await archiver.drain()
        running = await store.episode("one")
        await bus.append(episode_log("one"), 2, rest)
        await archiver.drain()
        finished = await store.episode("one")
    assert running is not None
    assert (running.status, running.turns, running.last_seq) == (None, 1, 2)
    assert running.started == first[0].time
    assert finished is not None
    assert (finished.status, finished.answer, finished.reward) == ("turn_limit", "2", 0.5)
    assert (finished.run_id, finished.task_id, finished.program) == ("run", "t", "p:q")
    assert (finished.index, finished.turns, finished.takeovers) == (3, 2, 1)
    assert finished.usage == usage + usage
    assert finished.finished == rest[-1].time


async def test_run_record_and_metrics_follow_the_runs_log(
    bus: MemoryBus, store: SQLiteStore
) -> None:
    log = run_log("r")
    async with Archiver(bus, store) as archiver:
        await append(bus, log, RunStarted(kind="train", config={"steps": 2}))
        await append(bus, log, StepFinished(step=1, metrics={"actor/loss": 0.5}))
        await archiver.drain()
        (running,) = await store.runs()
        assert (running.kind, running.reason, running.finished) == ("train", None, None)
    async with Archiver(bus, store) as archiver:  # knows only what the store knows
        await append(bus, log, StepFinished(step=2, metrics={"actor/loss": 0.25}))
        await append(bus, log, RunFinished(reason="done"))
        await archiver.drain()
    (finished,) = await store.runs()
    assert finished.model_dump() == running.model_dump() | {
        "reason": "done",
        "finished": (await bus.read(log))[-1].time,
    }
    assert await store.metrics("r") == [(1, {"actor/loss": 0.5}), (2, {"actor/loss": 0.25})]


# --- reading through -----------------------------------------------------------------------------------------------


async def test_log_is_read_from_the_store_once_the_bus_let_it_go(
    bus: MemoryBus, store: SQLiteStore
) -> None:
    logs = Logs(bus, store)
    async with Archiver(bus, store) as archiver:
        await append(bus, "episode:1", *hello(5))
        await archiver.drain()
    before = await logs.read("episode:1")
    await bus.unlink("episode:1")
    assert await logs.read("episode:1") == before == await logs.read_all("episode:1")
    assert await logs.read("episode:1", 2, limit=2) == before[1:3]
    assert await logs.last_seq("episode:1") == 5
    assert await logs.read("episode:none") == []


async def test_tail_goes_from_the_store_over_to_the_bus(bus: MemoryBus, store: SQLiteStore) -> None:
    logs = Logs(bus, store)
    archived = [event.at(seq) for seq, event in enumerate(events(*hello(4)), 1)]
    await store.put_events("episode:1", archived)
    new = events(*hello(1))
    seen: list[str] = []
    with anyio.fail_after(5):
        async with logs.tail("episode:1", 2) as tail:
            await bus.restore("episode:1", archived)
            await bus.append("episode:1", 4, new)
            async for event in tail:
                seen.append(event.id)
                if len(seen) == 4:
                    break
    assert seen == [event.id for event in (*archived[1:], *new)]


async def test_comparison_finds_what_is_not_archived(bus: MemoryBus, store: SQLiteStore) -> None:
    await append(bus, "episode:1", *hello(2))
    name = new_id()
    await store.put_events(name, [event.at(1) for event in events(*hello(1))])
    comparison = await compare(bus, store)
    assert (comparison.differing, comparison.archived_logs, comparison.archived_events) == (2, 1, 1)
    assert not comparison.same
    async with Archiver(bus, store) as archiver:
        await archiver.drain()
    assert (await compare(bus, store)).same
