"""A worker's slots: what it takes it gives back, also what was taken from it. And a bus that has no room."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest
from redis.asyncio import Redis

from aworld_runtime.agents import Agent
from aworld_runtime.archive.verify import compare
from aworld_runtime.bus import Bus, open_bus
from aworld_runtime.bus.base import NodeInfo, read_all
from aworld_runtime.bus.redis import RedisBus
from aworld_runtime.bus.redis.entries import BODY
from aworld_runtime.bus.redis.keys import Keys
from aworld_runtime.bus.server import PrivateServer
from aworld_runtime.errors import WorkerRefusedError
from aworld_runtime.events import (
    EpisodeFinished,
    EpisodeRequested,
    EpisodeTakenOver,
    Event,
    EventData,
    MessagePosted,
    RunFinished,
    ToolCalled,
    ToolReturned,
)
from aworld_runtime.messages import Task, ToolCall
from aworld_runtime.models.scripted import ScriptedModel
from aworld_runtime.names import EPISODES_QUEUE, episode_log, run_log, tool_queue
from aworld_runtime.nodes.tool_worker import ToolWorker
from aworld_runtime.nodes.worker import Worker, check_version
from aworld_runtime.runtime import Runtime
from aworld_runtime.store.open import open_store
from tests.episodes import Gate
from tests.waiting import wait_until

pytestmark = pytest.mark.anyio


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[PrivateServer]:
    """A server for one test, which may do to it what it likes."""
    async with PrivateServer(tmp_path / "server") as server:
        yield server


def request(
    episode: str, code_version: str = "", *, program: str = "slow", timeout_s: float | None = None
) -> Event:
    data = EpisodeRequested(
        task=Task(id="t", prompt="go"),
        program=f"local:{program}",
        code_version=code_version,
        timeout_s=timeout_s,
    )
    return Event.of(data, source="test", run_id="r", episode_id=episode)


async def end_of(bus: Bus, episode: str) -> EpisodeFinished:
    """How an episode ended, once it has."""
    found: list[EpisodeFinished] = []

    async def ended() -> bool:
        log = await read_all(bus, episode_log(episode))
        found.extend(e.data for e in log if isinstance(e.data, EpisodeFinished))
        return bool(found)

    await wait_until(ended, timeout=10, description=f"the end of {episode}")
    return found[0]


def gated_agent(gate: Gate) -> Agent:
    model = ScriptedModel([ToolCall(id="c", name="gate"), "through"])
    return Agent("gated", llm=model, tools=[gate])


async def test_an_episode_queued_twice_runs_once_and_costs_nobody_a_slot() -> None:
    slow = Agent("slow", llm=ScriptedModel(lambda _: "done", delay_s=0.1))
    async with open_bus("memory://") as bus, anyio.create_task_group() as tasks:
        for episode in ("twice", "twice", "other", "another"):
            await bus.put(EPISODES_QUEUE, request(episode))
        for name in ("w1", "w2"):
            worker = Worker(bus, name=name, slots=1, programs={"local:slow": slow})
            tasks.start_soon(worker.run)

        async def settled() -> bool:
            return await bus.backlog(EPISODES_QUEUE) == 0

        await wait_until(settled, description="an empty queue")
        for episode in ("twice", "other", "another"):
            log = await read_all(bus, episode_log(episode))
            assert [e.seq for e in log if isinstance(e.data, EpisodeFinished)] == [len(log)]
        tasks.cancel_scope.cancel()


async def test_a_worker_of_other_code_leaves_an_episode_to_others() -> None:
    slow = {"local:slow": Agent("slow", llm=ScriptedModel("done"))}
    async with open_bus("memory://") as bus:
        await bus.put(EPISODES_QUEUE, request("e", code_version="2"))
        with pytest.raises(WorkerRefusedError, match="code version 1, the episode wants 2"):
            await Worker(bus, name="old", version="1", programs=slow).run()
        assert await bus.backlog(EPISODES_QUEUE) == 1
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(Worker(bus, name="new", version="2", programs=slow).run)

            async def ended() -> bool:
                log = await read_all(bus, episode_log("e"))
                return bool(log) and isinstance(log[-1].data, EpisodeFinished)

            await wait_until(ended, description="the episode's end")
            tasks.cancel_scope.cancel()
        finished = (await read_all(bus, episode_log("e")))[-1].data
        assert isinstance(finished, EpisodeFinished)
        assert finished.answer == "done"


async def test_a_worker_of_other_code_than_a_run_may_not_join() -> None:
    async with open_bus("memory://") as bus:
        await bus.announce(NodeInfo(name="trainer/r", kind="trainer", version="1"))
        with pytest.raises(WorkerRefusedError, match="trainer/r on this bus runs code version 1"):
            await check_version(bus, "2")
        # Resumed with other code; the trainer that died is still listed.
        await bus.announce(NodeInfo(name="launcher/r", kind="launcher", version="2"))
        await check_version(bus, "2")
        with pytest.raises(WorkerRefusedError, match="launcher/r on this bus runs code version 2"):
            await check_version(bus, "1")


async def test_a_run_has_the_code_of_whoever_resumed_it_last(server: PrivateServer) -> None:
    async with open_bus(server.url) as killed, open_bus(server.url) as bus:
        for version, speaker in (("1", killed), ("2", bus)):
            await speaker.announce(NodeInfo(name="launcher/r", kind="launcher", version=version))
        await check_version(bus, "2")
        with pytest.raises(WorkerRefusedError, match="launcher/r on this bus runs code version 2"):
            await check_version(bus, "1")


@pytest.mark.parametrize("timeout_s, reason", [(None, "answered"), (0.5, "time_limit")])
async def test_a_worker_waits_while_the_bus_is_full(
    server: PrivateServer,
    caplog: pytest.LogCaptureFixture,
    timeout_s: float | None,
    reason: str,
) -> None:
    """Its episode's time goes on meanwhile; the end, whichever, is written once there is room."""
    gate = Gate()
    async with (
        open_bus(server.url) as bus,
        Redis.from_url(server.url) as admin,
        anyio.create_task_group() as tasks,
    ):
        worker = Worker(bus, name="w", programs={"local:gated": gated_agent(gate)})
        tasks.start_soon(worker.run)
        await bus.put(EPISODES_QUEUE, request("e", program="gated", timeout_s=timeout_s))
        await gate.reached.wait()
        due = anyio.current_time() + (timeout_s or 0)
        await admin.config_set("maxmemory", 1)
        gate.open.set()

        def warnings(who: str) -> int:
            start = f"{who} waits until there is room"
            return sum(r.getMessage().startswith(start) for r in caplog.records)

        await wait_until(lambda: warnings(episode_log("e")) > 0, description="the owner's warning")
        await wait_until(lambda: warnings("worker w") > 0, description="the worker's warning")
        await wait_until(lambda: anyio.current_time() > due, description="the time limit")
        await admin.config_set("maxmemory", 0)
        assert (await end_of(bus, "e")).reason == reason
        await wait_until(lambda: worker.running == 0, description="the worker's next episode")
        assert warnings(episode_log("e")) == 1
        tasks.cancel_scope.cancel()


async def test_a_tool_worker_waits_while_the_bus_is_full(
    server: PrivateServer, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()
    called = request("e").caused(
        ToolCalled(call=ToolCall(id="c", name="gate")), source="solver/w", trust="model"
    )
    async with (
        open_bus(server.url) as bus,
        Redis.from_url(server.url) as admin,
        bus.mailbox(episode_log("e")) as mail,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(ToolWorker(bus, {"gate": gate}, name="t").run)
        await bus.put(tool_queue("gate"), called)
        await gate.reached.wait()
        await admin.config_set("maxmemory", 1)
        gate.open.set()
        for who in ("gate/t", "tool worker t"):
            await wait_until(
                lambda who=who: f"{who} waits until there is room" in caplog.text,
                description=f"a warning of {who}",
            )
        await admin.config_set("maxmemory", 0)
        with anyio.fail_after(5):
            (answer,) = await anext(aiter(mail))
        assert answer.event.data == ToolReturned(name="gate", content="open")
        tasks.cancel_scope.cancel()


async def test_a_runtime_waits_while_the_bus_is_full(
    server: PrivateServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        Runtime(bus=server.url, store=f"sqlite:///{tmp_path}/store.db") as runtime,
        Redis.from_url(server.url) as admin,
        anyio.create_task_group() as tasks,
    ):
        await admin.config_set("maxmemory", 1)

        async def make_room() -> None:
            await wait_until(
                lambda: f"runtime/{runtime.run_id} waits until there is room" in caplog.text,
                description="the run's warning",
            )
            await admin.config_set("maxmemory", 0)

        tasks.start_soon(make_room)
        with anyio.fail_after(20):
            assert (await runtime.run("tests.replayed:swarm", "Add.")).answer == "checked: 100"


async def test_a_run_that_is_done_while_the_server_stalls_has_its_end_in_bus_and_store(
    server: PrivateServer, tmp_path: Path
) -> None:
    async with (
        Redis.from_url(server.url) as admin,
        open_bus(server.url) as bus,
        open_store(f"sqlite:///{tmp_path}/store.db") as store,
        anyio.create_task_group() as tasks,
    ):
        async with Runtime(bus=server.url, store=store.url) as runtime:
            assert (await runtime.run("tests.replayed:swarm", "Add.")).answer == "checked: 100"
            await admin.client_pause(2500, all=False)
            ours = runtime.bus
            assert isinstance(ours, RedisBus)
            tasks.start_soon(ours.put, "other", request("e"))
            await wait_until(lambda: ours.waiting_bytes > 0, description="a call that waits")
        last = (await read_all(bus, run_log(runtime.run_id)))[-1]
        assert last.data == RunFinished(reason="done")
        assert (await compare(bus, store)).same


async def test_what_is_no_episode_outlives_a_full_bus_and_ends_among_the_dead_letters(
    server: PrivateServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        open_bus(server.url) as bus,
        Redis.from_url(server.url) as admin,
        anyio.create_task_group() as tasks,
    ):
        async with bus.consume(EPISODES_QUEUE, consumer="before"):
            junk = Event.of(MessagePosted(content="no episode"), source="test")
            await bus.put(EPISODES_QUEUE, junk)

            async def known() -> bool:
                return bool(await admin.xinfo_groups("aworld:{q:episodes}:work"))

            await wait_until(known, description="the queue's group")
        await admin.config_set("maxmemory", 1)
        tasks.start_soon(Worker(bus, name="w").run)
        await wait_until(
            lambda: "not among the dead letters yet" in caplog.text, description="a refusal"
        )
        await admin.config_set("maxmemory", 0)

        async def buried() -> bool:
            return bool(await bus.dead_letters(EPISODES_QUEUE))

        await wait_until(buried, description="the dead letter")
        tasks.cancel_scope.cancel()


async def test_an_episode_whose_log_cannot_be_read_fails_and_takes_no_worker_down(
    server: PrivateServer,
) -> None:
    slow = Agent("slow", llm=ScriptedModel(lambda _: "done"))
    async with (
        open_bus(server.url) as bus,
        Redis.from_url(server.url) as admin,
        bus.mailbox(run_log("r")) as mail,
        anyio.create_task_group() as tasks,
    ):
        await admin.xadd(Keys("aworld").log(episode_log("bad")).log, {BODY: b"junk"}, id="1-0")
        await bus.put(EPISODES_QUEUE, request("bad"), request("good"))
        tasks.start_soon(Worker(bus, name="w", programs={"local:slow": slow}).run)
        ends: dict[str | None, EventData] = {}
        with anyio.fail_after(10):
            while len(ends) < 2:
                ends |= {m.event.episode_id: m.event.data for m in await anext(mail)}
        bad, good = ends["bad"], ends["good"]
        assert isinstance(bad, EpisodeFinished)
        assert bad.reason == "failed"
        assert "MalformedEventError: event 1 of episode:bad in redis:" in (bad.error or "")
        assert isinstance(good, EpisodeFinished)
        assert good.answer == "done"
        (letter,) = await bus.dead_letters(EPISODES_QUEUE)
        assert letter.event is not None
        assert (letter.event.episode_id, letter.deliveries) == ("bad", 3)
        tasks.cancel_scope.cancel()


async def test_an_episode_whose_log_goes_on_behind_its_end_fails_and_takes_no_worker_down() -> None:
    slow = Agent("slow", llm=ScriptedModel(lambda _: "done"))
    async with (
        open_bus("memory://") as bus,
        bus.mailbox(run_log("r")) as mail,
        anyio.create_task_group() as tasks,
    ):
        ended = Event.of(EpisodeFinished(reason="failed"), source="test", episode_id="bad")
        behind = Event.of(MessagePosted(content="too late"), source="test", episode_id="bad")
        await bus.append(episode_log("bad"), 0, [request("bad"), ended, behind])
        await bus.put(EPISODES_QUEUE, request("bad"), request("good"))
        tasks.start_soon(Worker(bus, name="w", programs={"local:slow": slow}).run)
        ends: dict[str | None, str] = {}
        with anyio.fail_after(10):
            while len(ends) < 2:
                for item in await anext(mail):
                    assert isinstance(item.event.data, EpisodeFinished)
                    ends[item.event.episode_id] = item.event.data.error or ""
        assert "goes on behind its end at event 2" in ends["bad"]
        assert not ends["good"]
        assert await bus.last_seq(episode_log("bad")) == 3
        (letter,) = await bus.dead_letters(EPISODES_QUEUE)
        assert letter.event is not None
        assert (letter.event.episode_id, letter.deliveries) == ("bad", 3)
        tasks.cancel_scope.cancel()


async def test_an_episode_goes_on_where_the_server_came_back_without_its_last_writes(
    tmp_path: Path,
) -> None:
    first, second = Gate("first"), Gate("second")
    calls = [ToolCall(id=gate.name, name=gate.name) for gate in (first, second)]
    agent = Agent("gated", llm=ScriptedModel([*calls, "through"]), tools=[first, second])
    async with (
        PrivateServer(tmp_path, options={"appendonly": "no"}) as server,
        open_bus(server.url) as bus,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(Worker(bus, name="w", programs={"local:gated": agent}).run)
        await bus.put(EPISODES_QUEUE, request("e", program="gated"))
        await first.reached.wait()
        async with Redis.from_url(server.url) as admin:
            await admin.save()
        kept = await bus.last_seq(episode_log("e"))
        first.open.set()
        await second.reached.wait()
        before = await read_all(bus, episode_log("e"))
        assert server.process is not None
        server.process.send_signal(signal.SIGKILL)
        await server.process.wait(deadline=5)
        await server.start()
        assert await bus.last_seq(episode_log("e")) == kept < len(before)
        second.open.set()
        assert (await end_of(bus, "e")).answer == "through"
        after = await read_all(bus, episode_log("e"))
        assert [e.id for e in after[: len(before)]] == [e.id for e in before]
        assert not [e for e in after if isinstance(e.data, EpisodeTakenOver)]

        async def settled() -> bool:
            return await bus.backlog(EPISODES_QUEUE) == 0

        await wait_until(settled, description="an empty queue")
        tasks.cancel_scope.cancel()


async def test_a_worker_leaves_a_server_that_refuses_every_change(server: PrivateServer) -> None:
    async with open_bus(server.url) as bus, Redis.from_url(server.url) as admin:
        worker = Worker(bus, name="w")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(worker.run)

            async def announced() -> bool:
                return bool(await bus.nodes())

            await wait_until(announced, description="the worker")
            await admin.config_set("min-replicas-to-write", 1)  # as with a full disk
            worker.drain()
        await admin.config_set("min-replicas-to-write", 0)
