"""What happens when a part dies that no other test here kills: rows of docs/delivery.md, on real processes and servers."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import anyio
import pytest
from redis.asyncio import Redis

from aworld_runtime.agents import Agent
from aworld_runtime.archive.archiver import Archiver
from aworld_runtime.archive.verify import compare
from aworld_runtime.bus import Bus, open_bus
from aworld_runtime.bus.base import LEASE_S, read_all
from aworld_runtime.bus.redis.cluster import SHARDS, slot_of
from aworld_runtime.bus.redis.keys import Keys
from aworld_runtime.bus.server import PrivateServer, find_server_binary
from aworld_runtime.chaos.proxy import Mode, Proxy
from aworld_runtime.errors import BusFullError, LogRewoundError, StoreUnavailableError
from aworld_runtime.events import (
    EpisodeCancelled,
    EpisodeFinished,
    EpisodeTakenOver,
    Event,
    MessagePosted,
    ToolCalled,
    ToolReturned,
)
from aworld_runtime.messages import ToolCall
from aworld_runtime.models.scripted import ScriptedModel
from aworld_runtime.names import EPISODES_QUEUE, episode_log
from aworld_runtime.nodes.worker import Worker
from aworld_runtime.processes import HOST, ChildProcess, free_port, spawn
from aworld_runtime.runtime import Runtime
from aworld_runtime.store.open import open_store
from aworld_runtime.tools.base import RemoteTool
from tests import deadly
from tests.episodes import Gate, of_kind, one, owner_of, request_episode
from tests.faults import kill
from tests.services import BusCluster
from tests.waiting import wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.chaos, pytest.mark.timeout(60)]
ROOT = Path(__file__).parents[2]
KEYS = Keys("aworld", SHARDS)
BUSY_S = 3.0
"""What a busy machine may take beside the times that are promised; `aworld chaos` holds the times themselves."""


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[PrivateServer]:
    """A server for one test, which may do to it what it likes."""
    async with PrivateServer(tmp_path / "server") as server:
        yield server


@pytest.fixture
async def bus(server: PrivateServer) -> AsyncIterator[Bus]:
    async with open_bus(server.url) as opened:
        yield opened


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where programs of `tests.deadly` leave and find their files."""
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


@asynccontextmanager
async def workers(
    url: str, log: Path, *names: str, options: tuple[str, ...] = ()
) -> AsyncGenerator[list[ChildProcess]]:
    """`aworld worker` of each name, which is on the bus."""
    command = [sys.executable, "-m", "aworld_runtime.cli", "worker", "--bus", url, *options]
    processes: list[ChildProcess] = []
    try:
        for name in names:
            process = await spawn(
                [*command, "--name", name], log=log, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}
            )
            processes.append(process)
        async with open_bus(url) as bus:

            async def are_there() -> bool:
                assert all(process.returncode is None for process in processes), names
                return {f"worker/{name}" for name in names} <= {n.name for n in await bus.nodes()}

            await wait_until(are_there, 20, "the workers on the bus")
        yield processes
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            await process.wait(deadline=5)


def calls(place: Path) -> list[tuple[str, int]]:
    """What has begun there: its name, and the id of its process."""
    parts = [path.name.rpartition("-") for path in place.glob("*-*")]
    return [(name, int(pid)) for name, _, pid in parts]


async def begun(place: Path) -> list[int]:
    """Ids of the processes in which a handler has begun, once one has."""
    await wait_until(lambda: bool(calls(place)), 20, "a handler that runs")
    return [pid for _, pid in calls(place)]


async def ended(bus: Bus, requested: Event, timeout: float = 15.0) -> list[Event]:
    """The episode's log, once it has an end."""
    log: list[Event] = []

    async def has_ended() -> bool:
        log[:] = await read_all(bus, episode_log(requested.episode_id or ""))
        return bool(of_kind(log, EpisodeFinished))

    await wait_until(has_ended, timeout, "the end of the episode")
    return log


def gated(*gates: Gate) -> Agent:
    """Calls one after another, and ends."""
    calls = [ToolCall(id=gate.name, name=gate.name) for gate in gates]
    return Agent("gated", llm=ScriptedModel([*calls, "through"]), tools=list(gates))


def note(text: str) -> Event:
    return Event.of(MessagePosted(content=text), source="writer/1")


async def texts(bus: Bus, log: str) -> list[str]:
    return [note.content for note in of_kind(await read_all(bus, log), MessagePosted)]


# --- workers -------------------------------------------------------------------------------------------------------


async def test_an_episode_of_a_killed_worker_goes_on_in_another(
    server: PrivateServer, bus: Bus, place: Path, tmp_path: Path
) -> None:
    requested = deadly.requested("waits", place)
    log = episode_log(requested.episode_id or "")
    async with workers(server.url, tmp_path / "workers.log", "w1", "w2"):
        await bus.put(EPISODES_QUEUE, requested)
        (victim,) = await begun(place)
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()

        async def is_taken_over() -> bool:
            return bool(of_kind(await read_all(bus, log), EpisodeTakenOver))

        await wait_until(is_taken_over, LEASE_S + 1 + BUSY_S, "the takeover")
        assert time.monotonic() - killed > LEASE_S / 2, "a lease is not lost at once"
        (place / deadly.OPEN).touch()
        events = await ended(bus, requested)
        assert len(of_kind(events, EpisodeTakenOver)) == 1
        assert one(events, EpisodeFinished).answer == "through"


async def test_a_handler_that_ends_its_process_ends_three_workers_and_then_its_episode(
    server: PrivateServer, bus: Bus, place: Path, tmp_path: Path
) -> None:
    requested = deadly.requested("exits", place, group="r.g1")
    async with workers(server.url, tmp_path / "workers.log", "w1", "w2", "w3") as processes:
        await bus.put(EPISODES_QUEUE, requested)
        for process in processes:
            assert await process.wait(deadline=20) == 17
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Worker(bus, name="w4").run)
        finished = one(await ended(bus, requested), EpisodeFinished)
        assert finished.reason == "failed"
        assert "3 workers died in it" in (finished.error or "")
        tasks.cancel_scope.cancel()
    assert len(calls(place)) == 3


async def test_an_episode_that_no_worker_survives_can_be_cancelled(
    server: PrivateServer, bus: Bus, place: Path, tmp_path: Path
) -> None:
    """In no group, it is not given up; but its third owner listens before it starts what the others died of."""
    requested = deadly.requested("exits", place)
    log = episode_log(requested.episode_id or "")
    deaths = [Event.of(EpisodeTakenOver(worker=name), source=f"worker/{name}") for name in "ab"]
    await bus.append(log, 0, [requested, *deaths])
    await bus.put(EPISODES_QUEUE, requested)
    await bus.send_mail(log, Event.of(EpisodeCancelled(reason="poison"), source="cli/1"))
    async with workers(server.url, tmp_path / "workers.log", "w1") as (process,):
        events = await ended(bus, requested)
        assert process.returncode is None
        assert one(events, EpisodeFinished).reason == "cancelled"
        assert calls(place) == []


async def test_a_worker_whose_handler_holds_its_loop_is_missed_and_keeps_its_episode_until_killed(
    server: PrivateServer, bus: Bus, place: Path, tmp_path: Path
) -> None:
    requested = deadly.requested("blocks", place)
    said = tmp_path / "workers.log"
    async with workers(server.url, said, "w1") as (process,):
        await bus.put(EPISODES_QUEUE, requested)
        await begun(place)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(Worker(bus, name="w2").run)

            async def is_missed() -> bool:
                return {node.name for node in await bus.nodes()} == {"worker/w2"}

            await wait_until(is_missed, 5 + BUSY_S, "a worker that is silent")
            await wait_until(lambda: "has stood still" in said.read_text(), 10, "its own word")
            assert "in handle\n    while self.deed" in said.read_text(), "and who it is"
            log = await read_all(bus, episode_log(requested.episode_id or ""))
            assert of_kind(log, EpisodeTakenOver) == []
            process.send_signal(signal.SIGKILL)
            (place / deadly.OPEN).touch()
            assert one(await ended(bus, requested), EpisodeFinished).answer == "through"
            tasks.cancel_scope.cancel()


async def test_an_episode_outlives_who_asked_for_it(
    server: PrivateServer, bus: Bus, place: Path, tmp_path: Path
) -> None:
    """And is archived by whoever is next."""
    store_url = f"sqlite:///{tmp_path}/store.db"
    command = [sys.executable, "-m", "aworld_runtime.cli", "run", "tests.deadly:waits", str(place)]
    command += ["--bus", server.url, "--store", store_url, "--slots", "0"]
    async with workers(server.url, tmp_path / "workers.log", "w1"):
        asking = await spawn(
            command, log=tmp_path / "run.log", cwd=ROOT, env={"PYTHONPATH": str(ROOT)}
        )
        async with asking:
            await begun(place)
            asking.send_signal(signal.SIGKILL)
            await asking.wait(deadline=5)
        (place / deadly.OPEN).touch()

        async def is_idle() -> bool:
            return await bus.backlog(EPISODES_QUEUE) == 0

        await wait_until(is_idle, 10, "the end of the episode")
    async with Runtime(bus=server.url, store=store_url, slots=0):
        pass
    async with open_store(store_url) as store:
        (episode,) = await store.episodes()
        assert (episode.status, episode.answer) == ("answered", "through")


async def test_a_call_of_a_killed_tool_worker_is_made_again_under_its_id_and_answered_once(
    server: PrivateServer, bus: Bus, place: Path, tmp_path: Path
) -> None:
    call = ToolCall(id="c", name="order", arguments={"place": str(place)})
    remote = RemoteTool(deadly.order.get_schema())
    agent = Agent("buyer", llm=ScriptedModel([call, "done"]), tools=[remote])
    requested = request_episode()
    served = ("--tools", "tests.deadly:tools", "--slots", "1")
    async with (
        workers(server.url, tmp_path / "workers.log", "w1", "w2", options=served),
        anyio.create_task_group() as tasks,
    ):
        owner = owner_of(bus, requested, agent.program())
        tasks.start_soon(owner.run)
        (victim,) = await begun(place)
        os.kill(victim, signal.SIGKILL)

        await wait_until(lambda: len(calls(place)) == 2, LEASE_S + 1 + BUSY_S, "the call again")
        (called,) = (e for e in owner.events if isinstance(e.data, ToolCalled))
        assert {name for name, _ in calls(place)} == {f"{called.id}-by"}
        (place / deadly.OPEN).touch()
        events = await ended(bus, requested)
        assert [answer.content for answer in of_kind(events, ToolReturned)] == ["ordered"]
        assert one(events, EpisodeFinished).answer == "done"


# --- the network ---------------------------------------------------------------------------------------------------


@asynccontextmanager
async def network(server: PrivateServer, folder: Path) -> AsyncGenerator[tuple[Proxy, str]]:
    """What stands between, and the bus's URL beyond it."""
    assert server.port is not None
    proxy, port, control = Proxy(server.port), free_port(), folder / "control"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(proxy.serve, port, control)
        await wait_until(control.exists)
        yield proxy, f"redis://{HOST}:{port}"
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("mode", [Mode.CUT, Mode.MUTE_REQUESTS, Mode.MUTE_REPLIES])
async def test_a_network_that_fails_loses_and_doubles_no_append(
    server: PrivateServer, tmp_path: Path, mode: Mode
) -> None:
    async with network(server, tmp_path) as (proxy, url), open_bus(url) as bus:
        for number in range(30):
            async with anyio.create_task_group() as tasks:
                if number % 10 == 5:
                    proxy.switch(mode)
                tasks.start_soon(bus.append, "log", number, [note(str(number))])
                if number % 10 == 5:
                    await anyio.sleep(0.2)
                    proxy.switch(Mode.PASS)
        assert await texts(bus, "log") == [str(number) for number in range(30)]


async def test_a_connection_that_nobody_resets_is_given_up_for_a_new_one(
    server: PrivateServer, tmp_path: Path
) -> None:
    """The reply to the append vanished, and no later packet says so."""
    async with network(server, tmp_path) as (proxy, url), open_bus(url) as bus:
        await bus.append("log", 0, [note("before")])
        proxy.mode = Mode.MUTE_REPLIES
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(bus.append, "log", 1, [note("unanswered")])
            async with open_bus(server.url) as beside:

                async def is_there() -> bool:
                    return await beside.last_seq("log") == 2

                await wait_until(is_there, description="the append at the server")
            proxy.mode = Mode.PASS  # for new connections; this one has lost bytes
        assert await texts(bus, "log") == ["before", "unanswered"]


async def test_a_worker_that_is_cut_off_is_taken_over_and_refused_when_it_is_back(
    server: PrivateServer, bus: Bus, tmp_path: Path
) -> None:
    there, here = Gate(), Gate()
    requested = request_episode()
    log = episode_log(requested.episode_id or "")
    async with (
        network(server, tmp_path) as (proxy, url),
        open_bus(url) as beyond,
        anyio.create_task_group() as tasks,
    ):
        cut_off = Worker(beyond, name="cut off", programs={"local:test": gated(there)})
        tasks.start_soon(cut_off.run)
        await bus.put(EPISODES_QUEUE, requested)
        await there.reached.wait()
        proxy.switch(Mode.CUT)
        tasks.start_soon(Worker(bus, name="w", programs={"local:test": gated(here)}).run)
        with anyio.fail_after(LEASE_S + 1 + BUSY_S):
            await here.reached.wait()
        there.open.set()  # it goes on, and can't say so
        here.open.set()
        events = await ended(bus, requested)
        proxy.switch(Mode.PASS)
        await wait_until(lambda: cut_off.running == 0, 10, "the one that was cut off gives up")
        assert await read_all(bus, log) == events
        assert [e.worker for e in of_kind(events, EpisodeTakenOver)] == ["w"]
        assert len(of_kind(events, ToolReturned)) == len(of_kind(events, ToolCalled))
        tasks.cancel_scope.cancel()


# --- last writes -----------------------------------------------------------------------------------------------------


async def test_what_a_failover_lost_its_owner_puts_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A node dies whose replica has not got its last events, though they were acknowledged."""
    first, second = Gate("first"), Gate("second")
    agent = gated(first, second)
    async with (
        BusCluster(tmp_path) as cluster,
        cluster.replica_of(1, tmp_path / "replica") as replica,
        open_bus(cluster.url) as bus,
        anyio.create_task_group() as tasks,
    ):
        requested = request_episode()
        while cluster.owner(slot_of(KEYS.log(episode_log(requested.episode_id or "")).log)) != 1:
            requested = request_episode()
        log = episode_log(requested.episode_id or "")
        queue = next(q for q in "abcdefgh" if cluster.owner(slot_of(KEYS.queue(q).work)) != 1)
        worker = Worker(bus, name="w", programs={"local:test": agent}, queue=queue)
        tasks.start_soon(worker.run)
        await bus.put(queue, requested)
        await first.reached.wait()
        assert await cluster.tell(1, "WAIT", 1, 5000) == "1"
        server_id = await bus.server_id()
        assert replica.process is not None
        replica.process.send_signal(signal.SIGSTOP)
        await cluster.tell(1, "CLIENT", "KILL", "TYPE", "replica")
        first.open.set()
        await second.reached.wait()
        before = await read_all(bus, log)
        await kill(cluster.nodes[1])
        replica.process.send_signal(signal.SIGCONT)
        await wait_until(lambda: "they are put back" in caplog.text, 15, "the owner's warning")
        assert await bus.server_id() != server_id
        assert [e.id for e in await read_all(bus, log)] == [e.id for e in before]
        second.open.set()
        after = await ended(bus, requested)
        assert [e.id for e in after[: len(before)]] == [e.id for e in before]
        assert of_kind(after, EpisodeTakenOver) == []
        assert one(after, EpisodeFinished).answer == "through"
        tasks.cancel_scope.cancel()


async def test_last_writes_that_only_the_store_has_are_an_incident(tmp_path: Path) -> None:
    """Server and owner died together. The episode goes on from what the server has; nothing hides that it had been further."""
    first, second = Gate("first"), Gate("second")
    agent = gated(first, second)
    requested = request_episode()
    log = episode_log(requested.episode_id or "")
    async with (
        PrivateServer(tmp_path / "server", options={"appendonly": "no"}) as server,
        open_bus(server.url) as bus,
        open_store(f"sqlite:///{tmp_path}/store.db") as store,
        Archiver(bus, store) as archiver,
    ):
        before: list[Event] = []
        await bus.put(EPISODES_QUEUE, requested)
        async with anyio.create_task_group() as dying:
            dying.start_soon(Worker(bus, name="w1", programs={"local:test": agent}).run)
            await first.reached.wait()
            async with Redis.from_url(server.url) as admin:
                await admin.save()
            first.open.set()
            await second.reached.wait()
            await archiver.drain()
            before += await store.read(log)
            await kill(server)
            dying.cancel_scope.cancel()
        await server.start()
        assert 0 < await bus.last_seq(log) < len(before)
        second.open.set()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(Worker(bus, name="w2", programs={"local:test": agent}).run)
            await ended(bus, requested)
            tasks.cancel_scope.cancel()
        await wait_until(lambda: log in archiver.incidents, 10, "the incident")
        assert isinstance(archiver.incidents[log], LogRewoundError)
        assert await store.read(log) == before
        differences = (await compare(bus, store)).differences
        assert differences[0].on_bus != differences[0].in_store == before[differences[0].seq - 1].id


# --- disks ---------------------------------------------------------------------------------------------------------


@contextmanager
def files_end_at(size: int, pid: int = 0) -> Generator[None]:
    """No file of a process (0: this one) may grow above `size`: to who writes, much like a full disk."""
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


def longest(folder: Path) -> int:
    """Size of the largest file there."""
    return max(path.stat().st_size for path in folder.iterdir() if path.is_file())


async def test_a_full_disk_of_the_store_is_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        open_bus("memory://") as bus,
        open_store(f"sqlite:///{tmp_path}/store.db") as store,
        Archiver(bus, store) as archiver,
    ):
        await bus.append("log", 0, [note("before")])
        await archiver.drain()
        with files_end_at(longest(tmp_path)):
            for number in range(1, 101):
                await bus.append("log", number, [note("x" * 3000)])
            with pytest.raises(StoreUnavailableError, match="archived"):
                await archiver.drain(0.5)
            assert "the store fails; the run goes on" in caplog.text
        await archiver.drain()
        assert (await compare(bus, store)).same
        assert await store.last_seq("log") == 101


@asynccontextmanager
async def server_on_a_small_disk(folder: Path) -> AsyncGenerator[PrivateServer]:
    """Whose files can be made to end; see `fill`."""
    script = folder / "server.sh"
    script.write_text(f'#!/bin/sh\ntrap "" XFSZ\nexec {find_server_binary()} "$@"\n')
    script.chmod(0o755)
    async with PrivateServer(folder / "server", binary=script) as server:
        yield server


async def persistence(server: PrivateServer) -> dict[str, object]:
    async with Redis.from_url(server.url) as admin:
        return await admin.info("persistence")


async def rewrite(server: PrivateServer) -> None:
    """Its append-only file, to the end."""
    async with Redis.from_url(server.url) as admin:
        await admin.bgrewriteaof()
    await wait_until(lambda: is_rewritten(server), 20, "a rewritten file")


async def is_rewritten(server: PrivateServer) -> bool:
    facts = await persistence(server)
    there = (server.folder / "appendonlydir" / "appendonly.aof.2.incr.aof").exists()
    return there and not facts["aof_rewrite_in_progress"]


async def fill(bus: Bus, server: PrivateServer, seq: int) -> int:
    """Append to a log until the server's disk is full, then give it room; returns the last acknowledged seq."""
    assert server.process is not None
    room = longest(server.folder / "appendonlydir") + 50_000
    with files_end_at(room, server.process.pid):
        refusal = ""
        while not refusal:
            try:
                seq = await bus.append("log", seq, [note("x" * 1000)])
            except BusFullError as error:
                refusal = str(error)
        assert "MISCONF" in refusal
        assert await bus.last_seq("log") == seq
        with pytest.raises(BusFullError):
            await bus.put("queue", note("work"))

    async def has_room() -> bool:
        return (await persistence(server))["aof_last_write_status"] == "ok"

    await wait_until(has_room, description="a file that grows again")
    return await bus.append("log", seq, [note("after")])


@pytest.mark.parametrize("rewritten", [False, True])
async def test_a_full_disk_of_the_server_refuses_events_and_loses_none(
    tmp_path: Path, rewritten: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Its append-only file can't grow. Reads go on; once there is room, everything does. Behind a rewrite, that leaves a hole
    in the file.
    """
    async with server_on_a_small_disk(tmp_path) as server, open_bus(server.url) as bus:
        seq = await bus.append("log", 0, [note("before")])
        if rewritten:
            await rewrite(server)
        seq = await fill(bus, server, seq)
        await kill(server)
        await server.start()
        assert (await texts(bus, "log"))[-1] == "after"
        assert await bus.last_seq("log") == seq
        assert ("bytes of nothing" in caplog.text) == rewritten


async def test_a_watched_server_begins_its_file_anew_after_a_full_disk(tmp_path: Path) -> None:
    """A second one would else cut off what was written behind the hole that the first one left."""
    async with (
        server_on_a_small_disk(tmp_path) as server,
        open_bus(server.url) as bus,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(server.watch, 1.0)
        seq = await bus.append("log", 0, [note("before")])
        for _ in range(2):
            seq = await fill(bus, server, seq)
            await wait_until(lambda: is_rewritten(server), 20, "a rewritten file")
        tasks.cancel_scope.cancel()
        await kill(server)
        await server.start()
        assert await bus.last_seq("log") == seq
