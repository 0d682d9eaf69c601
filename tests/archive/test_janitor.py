"""The janitor: what goes, once it is over and in the store; and what comes back when a server has lost its data."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from pydantic import JsonValue
from redis.asyncio import Redis

from aworld_runtime.agents import Agent
from aworld_runtime.archive.archiver import Archiver
from aworld_runtime.archive.janitor import Janitor
from aworld_runtime.archive.logs import Logs
from aworld_runtime.archive.lost import put_back
from aworld_runtime.archive.verify import compare
from aworld_runtime.bus import Bus, open_bus
from aworld_runtime.bus.base import NodeInfo, read_all, read_own
from aworld_runtime.bus.server import PrivateServer
from aworld_runtime.cli.verdict import judge
from aworld_runtime.errors import EventsMissedError, Fenced
from aworld_runtime.events import (
    EpisodeFinished,
    EpisodeForked,
    EpisodeTakenOver,
    Event,
    LogRestored,
    MessagePosted,
    RunFinished,
    RunStarted,
    RunTakenOver,
)
from aworld_runtime.messages import ToolCall
from aworld_runtime.models.scripted import ScriptedModel
from aworld_runtime.names import EPISODES_QUEUE, episode_log, run_log
from aworld_runtime.nodes.claim import AGAIN_S
from aworld_runtime.nodes.worker import Worker
from aworld_runtime.replay.replay import replay
from aworld_runtime.runtime import Runtime
from aworld_runtime.store import EpisodeRecord, Store, open_store
from aworld_runtime.trajectory import episode_of
from tests.episodes import Gate, adding_program, of_kind, owner_of, request_episode, run_episode
from tests.faults import restart_empty
from tests.waiting import wait_until

pytestmark = pytest.mark.anyio


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store(f"sqlite:///{tmp_path}/store.db") as opened:
        yield opened


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[PrivateServer]:
    """A server for one test, which may do to it what it likes."""
    async with PrivateServer(tmp_path / "server") as server:
        yield server


@pytest.fixture(params=["memory", "redis"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "memory":
        return "memory://"
    server: PrivateServer = request.getfixturevalue("server")
    return server.url


@pytest.fixture
async def bus(url: str) -> AsyncIterator[Bus]:
    async with open_bus(url) as opened:
        yield opened


@asynccontextmanager
async def kept_clean(
    bus: Bus,
    store: Store,
    *,
    retire_after_s: float = 0.0,
    restore_after_s: float = 2.0,
    janitors: int = 1,
) -> AsyncGenerator[Sequence[Janitor]]:
    """With an archiver and its janitor, or several."""
    async with Archiver(bus, store) as archiver, anyio.create_task_group() as tasks:
        made = [
            Janitor(
                bus,
                store,
                archiver,
                retire_after_s=retire_after_s,
                restore_after_s=restore_after_s,
            )
            for _ in range(janitors)
        ]
        for janitor in made:
            tasks.start_soon(janitor.run)
        yield made
        tasks.cancel_scope.cancel()


def ids(events: Sequence[Event]) -> list[str]:
    return [event.id for event in events]


def note(text: str = "hello") -> Event:
    return Event.of(MessagePosted(content=text), source="writer/1")


async def retired(bus: Bus, log: str, timeout: float = 10.0) -> None:
    async def is_retired() -> bool:
        first = await bus.read(log, limit=1)
        return bool(first) and first[0].seq > 1

    await wait_until(is_retired, timeout, f"the retirement of {log}")


async def ended_episode(bus: Bus) -> str:
    """The log of one."""
    program, _, _ = adding_program()
    events = await run_episode(bus, request_episode(), program)
    return episode_log(events[0].episode_id or "")


async def length(bus: Bus) -> int:
    """Of the feed, which is short and not empty."""
    async with bus.feed() as feed:
        return len(await anext(feed))


# --- what goes -----------------------------------------------------------------------------------------------------


async def test_a_finished_and_archived_episode_is_retired_and_read_from_the_store(
    bus: Bus, store: Store
) -> None:
    program, _, _ = adding_program()
    requested = request_episode()
    log = episode_log(requested.episode_id or "")
    async with kept_clean(bus, store):
        events = await run_episode(bus, requested, program)
        await bus.send_mail(log, note("late"))
        await retired(bus, log)
    assert ids(await bus.read(log)) == [events[-1].id]
    assert await Logs(bus, store).read_all(log) == events
    assert episode_of(await Logs(bus, store).read_all(log)).answer == "checked: 100"
    report = await replay(await store.read(log), program)
    assert report.identical, report.divergence
    comparison = await compare(bus, store)
    assert comparison.same
    assert comparison.archived_logs == 1


async def test_a_server_that_refuses_every_change_is_waited_for(
    server: PrivateServer, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        open_bus(server.url) as bus,
        Redis.from_url(server.url) as admin,
        kept_clean(bus, store, retire_after_s=1.0),
    ):
        log = episode_log((requested := request_episode()).episode_id or "")
        await run_episode(bus, requested, adding_program()[0])
        await admin.config_set("min-replicas-to-write", 1)  # as with a full disk
        await wait_until(lambda: "housekeeping waits" in caplog.text, 10, "a refusal")
        await admin.config_set("min-replicas-to-write", 0)
        await retired(bus, log)


async def test_an_owner_of_a_retired_log_is_refused_and_a_new_one_finds_it_finished(
    bus: Bus, store: Store
) -> None:
    program, _, _ = adding_program()
    requested = request_episode()
    async with kept_clean(bus, store):
        events = await run_episode(bus, requested, program)
        log = episode_log(requested.episode_id or "")
        await retired(bus, log)
    with pytest.raises(Fenced):
        await bus.append(log, 3, [note()])
    late = owner_of(bus, requested, program)
    assert await late.run() == events[-1].data
    assert await bus.last_seq(log) == len(events)


async def test_what_goes_on_or_is_not_over_stays(bus: Bus, store: Store) -> None:
    resumed, unfinished = run_log("resumed"), episode_log("unfinished")
    started = Event.of(RunStarted(kind="run"), source="runtime/r", run_id="resumed")
    async with kept_clean(bus, store, retire_after_s=1.0):
        end = Event.of(RunFinished(reason="interrupted"), source="runtime/r", run_id="resumed")
        await bus.append(resumed, 0, [started, end])
        await bus.append(unfinished, 0, [note(), note()])
        again = Event.of(RunTakenOver(node="trainer/2"), source="runtime/r", run_id="resumed")
        await bus.append(resumed, 2, [again])
        other = run_log("other")
        await bus.append(
            other, 0, [e.model_copy(update={"run_id": "other"}) for e in (started, end)]
        )
        await retired(bus, other)
        assert len(await bus.read(resumed)) == 3
        assert len(await bus.read(unfinished)) == 2


async def test_the_next_janitor_retires_what_the_last_one_left(bus: Bus, store: Store) -> None:
    program, _, _ = adding_program()
    left = request_episode()
    async with kept_clean(bus, store, retire_after_s=3600):
        await bus.append("other", 0, [note()])

        async def is_archived() -> bool:
            return await store.last_seq("other") == 1

        await wait_until(is_archived, description="a cursor before the episode")
        await run_episode(bus, left, program)

        async def is_trimmed() -> bool:
            return await store.cursor(f"janitor@{await bus.feed_id()}") is not None

        await wait_until(is_trimmed, description="a cursor of the janitor")
    async with kept_clean(bus, store):
        await retired(bus, episode_log(left.episode_id or ""))


async def test_the_feed_is_trimmed_behind_whoever_is_last(bus: Bus, store: Store) -> None:
    for number in range(10):
        await bus.append("log", number, [note()])
    async with bus.feed() as feed:
        place = (await anext(feed))[3].cursor
    detail: dict[str, JsonValue] = {"feed": await bus.feed_id(), "cursor": place}
    slow = NodeInfo(name="slow/1", kind="archiver", detail=detail)
    await bus.announce(slow, ttl_s=60)
    async with kept_clean(bus, store):

        async def is_trimmed() -> bool:
            return await length(bus) < 10

        await wait_until(is_trimmed, description="a shorter feed")
        async with bus.feed(place) as feed:
            assert next(entry.first for entry in await anext(feed)) == 5, "the next one is there"
        await bus.withdraw(slow.name)

        async def is_trimmed_further() -> bool:
            return await length(bus) < 3

        await wait_until(is_trimmed_further, description="a feed without the slow one")
    assert len(await store.read("log")) == 10


async def test_nothing_is_trimmed_that_a_subscription_has_not_read(bus: Bus, store: Store) -> None:
    await bus.append("log", 0, [note()])
    events = aiter(bus.subscribe())
    assert (await anext(events)).seq == 1, "it has begun, and stands still"
    for number in range(1, 10):
        await bus.append("log", number, [note()])
    async with kept_clean(bus, store):
        for _ in range(2):  # the janitor trims after it has retired something
            await retired(bus, await ended_episode(bus))
        assert [(await anext(events)).seq for _ in range(9)] == [*range(2, 11)]
        (node,) = [node for node in await bus.nodes() if node.kind == "subscriber"]
        await events.aclose()
    assert node.name not in [node.name for node in await bus.nodes()]


async def test_a_subscription_that_comes_to_a_log_after_its_retirement_says_what_it_missed(
    bus: Bus, store: Store
) -> None:
    await bus.append("log", 0, [note()])
    events = aiter(bus.subscribe())
    await anext(events)
    async with kept_clean(bus, store):
        log = await ended_episode(bus)
        await retired(bus, log)
        with pytest.raises(EventsMissedError, match=f"{log} has ended, and its events 1 to"):
            await anext(events)


async def test_nothing_is_trimmed_that_the_archiver_has_not_read(
    store: Store, tmp_path: Path
) -> None:
    """Its store is away: the janitor waits, too."""
    async with open_bus("memory://") as bus:
        async with open_store(f"sqlite:///{tmp_path}/other.db") as closed:
            pass
        async with kept_clean(bus, closed):
            for number in range(10):
                await bus.append("log", number, [note()])
            await anyio.sleep(1.5)
            assert await length(bus) == 10
        async with kept_clean(bus, store):

            async def archived() -> bool:
                return await store.last_seq("log") == 10

            await wait_until(archived, description="all of it in the store")


async def test_episodes_that_nobody_goes_on_with_are_told_by_verify(bus: Bus, store: Store) -> None:
    done = Event.of(EpisodeFinished(answer="done"), source="worker/w")
    await store.put_events(episode_log("lost"), [note().at(1)])
    await store.put_events(episode_log("done"), [note().at(1), done.at(2)])
    for name in ("lost", "done"):
        await store.put_episode(EpisodeRecord(id=name, last_seq=1))
    found = await judge(bus, store)
    assert found.same
    assert (found.unfinished, found.archived_logs) == ((episode_log("lost"),), 2)


async def test_two_janitors_do_no_more_than_one(bus: Bus, store: Store) -> None:
    program, _, _ = adding_program()
    requests = [request_episode() for _ in range(5)]
    logs = [episode_log(requested.episode_id or "") for requested in requests]
    async with kept_clean(bus, store, janitors=2):
        events = [await run_episode(bus, requested, program) for requested in requests]
        for log in logs:
            await retired(bus, log)
    for log, recorded in zip(logs, events, strict=True):
        assert ids(await bus.read(log)) == [recorded[-1].id]
        assert await store.read(log) == recorded


# --- what comes back -----------------------------------------------------------------------------------------------


def gated(gate: Gate) -> Agent:
    model = ScriptedModel([ToolCall(id="c", name="gate"), "through"])
    return Agent("gated", llm=model, tools=[gate])


async def ended(bus: Bus, store: Store, log: str, timeout: float = 20.0) -> list[Event]:
    """All of the log, once its episode has ended."""
    found: list[Event] = []

    async def has_ended() -> bool:
        found[:] = await read_own(Logs(bus, store), log)
        return bool(of_kind(found, EpisodeFinished))

    await wait_until(has_ended, timeout, f"the end of {log}")
    return found


@asynccontextmanager
async def begun(bus: Bus, store: Store, gate: Gate) -> AsyncGenerator[tuple[Event, list[Event]]]:
    """An episode whose owner is killed while a tool runs; everything is in the store."""
    requested = request_episode()
    program = gated(Gate()) if gate.open.is_set() else gated(gate)
    owner = owner_of(bus, requested, program.program())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(owner.run)

        async def archived() -> bool:
            return await store.last_seq(owner.log) == len(owner.events) > 5

        await wait_until(archived, description="the episode's beginning in the store")
        tasks.cancel_scope.cancel()
    yield requested, await store.read(owner.log)


async def feeds_known(bus: Bus, store: Store) -> None:
    """The next janitor will know which feed the bus had."""

    async def written_down() -> bool:
        return await store.bus(bus.url) is not None

    await wait_until(written_down, description="the feed's name in the store")


@pytest.mark.parametrize("janitors", [1, 2])
async def test_an_episode_whose_owner_died_with_the_servers_data_is_restored_and_ends(
    server: PrivateServer, store: Store, janitors: int
) -> None:
    gate = Gate()
    gate.open.set()
    async with (
        open_bus(server.url) as bus,
        kept_clean(bus, store, janitors=janitors, retire_after_s=60.0),
        begun(bus, store, gate) as (requested, before),
        anyio.create_task_group() as tasks,
    ):
        await restart_empty(server)
        worker = Worker(bus, name="w", programs={"local:test": gated(gate)})
        tasks.start_soon(worker.run)
        log = episode_log(requested.episode_id or "")
        after = await ended(bus, store, log)
        assert ids(after[: len(before)]) == ids(before)
        assert of_kind(after, LogRestored) == [LogRestored(at=len(before))]
        assert after[len(before)].data == LogRestored(at=len(before))
        assert len(of_kind(after, EpisodeTakenOver)) == 1
        assert of_kind(after, EpisodeFinished)[0].answer == "through"

        async def archived() -> bool:
            return await store.last_seq(log) == len(after)

        await wait_until(archived, description="its end in the store")
        report = await replay(after, gated(gate).program())
        assert report.identical, report.divergence
        tasks.cancel_scope.cancel()


async def test_a_janitor_that_comes_after_the_loss_restores_what_the_last_one_knew_of(
    server: PrivateServer, store: Store
) -> None:
    gate = Gate()
    gate.open.set()
    async with open_bus(server.url) as bus, anyio.create_task_group() as tasks:
        async with kept_clean(bus, store), begun(bus, store, gate) as (requested, before):
            await feeds_known(bus, store)
        await restart_empty(server)
        async with kept_clean(bus, store, retire_after_s=60.0):
            tasks.start_soon(Worker(bus, name="w", programs={"local:test": gated(gate)}).run)
            after = await ended(bus, store, episode_log(requested.episode_id or ""))
            assert after[len(before)].data == LogRestored(at=len(before))
        tasks.cancel_scope.cancel()


async def test_a_janitor_that_dies_before_it_has_restored_leaves_that_to_the_next_one(
    server: PrivateServer, store: Store
) -> None:
    """And then the server loses its data once more."""
    gate = Gate()
    gate.open.set()
    logs: list[str] = []
    async with open_bus(server.url) as bus:
        for _ in range(2):
            async with kept_clean(bus, store, restore_after_s=60.0), begun(bus, store, gate) as one:
                logs.append(episode_log(one[0].episode_id or ""))
                feed_id = await bus.feed_id()

                async def known(feed_id: str = feed_id) -> bool:
                    record = await store.bus(bus.url)
                    return record is not None and feed_id in record.feeds

                await wait_until(known, description="the feed's name in the store")
            await restart_empty(server)
        async with (
            kept_clean(bus, store, retire_after_s=60.0),
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(Worker(bus, name="w", programs={"local:test": gated(gate)}).run)
            for log in logs:
                assert len(of_kind(await ended(bus, store, log), LogRestored)) == 1
            tasks.cancel_scope.cancel()


async def test_a_log_whose_janitor_died_right_after_putting_it_back_goes_on(
    server: PrivateServer, store: Store
) -> None:
    """And the archiver is so far behind that it has copied nothing of the new feed."""
    gate = Gate()
    gate.open.set()
    async with open_bus(server.url) as bus, anyio.create_task_group() as tasks:
        async with kept_clean(bus, store), begun(bus, store, gate) as (requested, before):
            await feeds_known(bus, store)
        await restart_empty(server)
        log = episode_log(requested.episode_id or "")
        await put_back(bus, log, before)
        behind = Archiver(bus, store)
        behind.feed_id = await bus.feed_id()
        janitor = Janitor(bus, store, behind, retire_after_s=60.0, restore_after_s=0.5)
        tasks.start_soon(janitor.run)
        tasks.start_soon(Worker(bus, name="w", programs={"local:test": gated(gate)}).run)
        after = await ended(bus, store, log)
        assert ids(after[: len(before)]) == ids(before)
        assert after[len(before)].data == LogRestored(at=len(before))
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("has_ended", [False, True])
async def test_what_a_late_owner_puts_back_is_completed_before_anybody_goes_on(
    server: PrivateServer, store: Store, has_ended: bool
) -> None:
    """It was stopped and taken over, then the server lost its data; of what the other wrote the store has all."""
    requested = request_episode()
    log = episode_log(requested.episode_id or "")
    end = [requested.caused(EpisodeFinished(answer="done"), source="w/2")] if has_ended else []
    async with open_bus(server.url) as bus:
        async with kept_clean(bus, store, retire_after_s=60.0):
            await bus.append(log, 0, [requested, note("one"), note("two"), note("three"), *end])
            before = await read_all(bus, log)

            async def archived() -> bool:
                record = await store.episode(requested.episode_id or "")
                return record is not None and record.last_seq == len(before)

            await wait_until(archived, description="the episode in the store")
        await restart_empty(server)
        async with kept_clean(bus, store, retire_after_s=60.0, restore_after_s=60.0):
            await put_back(bus, log, before[:2])

            async def completed() -> bool:
                return await bus.last_seq(log) == len(before) + (not has_ended)

            await wait_until(completed, timeout=AGAIN_S, description="all of the log on the bus")
            after = await read_all(bus, log)
            assert ids(after[: len(before)]) == ids(before)
            said = [] if has_ended else [LogRestored(at=len(before))]
            assert [event.data for event in after[len(before) :]] == said
            assert await bus.backlog(EPISODES_QUEUE) == len(said)


async def test_an_episode_whose_end_alone_is_not_in_its_record_is_restored_and_stays_ended(
    server: PrivateServer, store: Store
) -> None:
    """Its archiver was killed between the last events and the record, and then the server lost its data."""
    gate = Gate()
    gate.open.set()
    async with open_bus(server.url) as bus:
        async with kept_clean(bus, store), begun(bus, store, gate) as (requested, _):
            await feeds_known(bus, store)
        before = await run_episode(bus, requested, gated(gate).program())
        log = episode_log(requested.episode_id or "")
        await store.put_events(log, before)
        await restart_empty(server)
        async with kept_clean(bus, store, retire_after_s=60.0) as (janitor,):

            async def told() -> bool:
                record = await store.episode(requested.episode_id or "")
                return record is not None and record.status == "answered"

            await wait_until(told, 15, "the end in its record")
            assert not janitor.incidents
        assert ids(await read_all(bus, log)) == ids(before)
        assert await bus.backlog(EPISODES_QUEUE) == 0


async def test_what_nobody_can_run_from_its_log_ends_with_the_loss(
    server: PrivateServer, store: Store
) -> None:
    async with open_bus(server.url) as bus, kept_clean(bus, store, retire_after_s=60.0):
        forked = Event.of(EpisodeForked(parent="p", at=3), source="fork/1", episode_id="f")
        await bus.append(episode_log("f"), 3, [forked, note()])

        async def archived() -> bool:
            return await store.last_seq(episode_log("f")) == 5

        await wait_until(archived, description="the fork in the store")
        await restart_empty(server)
        after = await ended(bus, store, episode_log("f"))
        finished = of_kind(after, EpisodeFinished)[0]
        assert finished.reason == "failed"
        assert "the bus lost this episode" in (finished.error or "")
        assert [event.seq for event in after] == [4, 5, 6, 7]


async def test_a_log_that_began_anew_before_it_was_restored_is_an_incident(
    server: PrivateServer, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()
    async with (
        open_bus(server.url) as bus,
        kept_clean(bus, store, retire_after_s=60.0) as (janitor,),
        begun(bus, store, gate) as (requested, before),
    ):
        await restart_empty(server)
        log = episode_log(requested.episode_id or "")
        with caplog.at_level(logging.ERROR):
            await bus.append(log, 0, [note()])
            await wait_until(lambda: log in janitor.incidents, 15, "the incident")
        assert "began anew" in str(janitor.incidents[log])
        assert "is lost" in caplog.text
        assert ids(await store.read(log)) == ids(before)
        assert not (await compare(bus, store)).same


async def test_a_runtime_ends_every_episode_though_the_server_loses_its_data(
    server: PrivateServer, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that runs, and some that wait in the queue; and the run's own log."""
    monkeypatch.setenv("AWORLD_RESTORE_AFTER_S", "2")
    async with Runtime(bus=server.url, store=store.url, slots=1) as runtime:
        submitted = [await runtime.submit("tests.replayed:swarm", "Add.") for _ in range(3)]
        await restart_empty(server)
        with anyio.fail_after(30):
            for episode in submitted:
                assert (await runtime.result(episode)).answer == "checked: 100"
        recorded = await read_all(runtime.bus, run_log(runtime.run_id))
    ends = [e.episode_id for e in recorded if isinstance(e.data, EpisodeFinished)]
    assert sorted(filter(None, ends)) == sorted(submitted)
    assert recorded[0].type == "run.started"
    assert await store.read(run_log(runtime.run_id), limit=len(recorded)) == recorded
