"""`aworld archive`, as a process: the archiver and the janitor of a bus that workers alone are on."""

from __future__ import annotations

import json
import signal
import sqlite3
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import anyio
import pytest
from anyio import to_thread

from aworld_runtime.agents import Agent
from aworld_runtime.bus import Bus, open_bus
from aworld_runtime.bus.server import PrivateServer
from aworld_runtime.events import Event, MessagePosted
from aworld_runtime.models.scripted import ScriptedModel
from aworld_runtime.names import EPISODES_QUEUE, episode_log
from aworld_runtime.nodes.worker import Worker
from aworld_runtime.processes import free_port
from aworld_runtime.store import open_store
from tests.commands import get_text, serving
from tests.episodes import request_episode
from tests.waiting import wait_until

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
async def server_url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    async with PrivateServer(tmp_path_factory.mktemp("server")) as server:
        yield server.url


@pytest.fixture
def bus_url(server_url: str, request: pytest.FixtureRequest) -> str:
    """A bus of the test's own."""
    return f"{server_url}?namespace={request.node.name}"


archive = partial(
    serving, "archive", says="archiver on ", environment={"AWORLD_RETIRE_AFTER_S": "0"}
)


def notes(count: int) -> list[Event]:
    return [Event.of(MessagePosted(content=f"{i}"), source="writer/1") for i in range(count)]


@pytest.mark.slow
async def test_what_workers_alone_do_is_stored_and_freed(bus_url: str, tmp_path: Path) -> None:
    store_url = f"sqlite:///{tmp_path}/store.db"
    port = free_port()
    requested = request_episode()
    log = episode_log(requested.episode_id or "")
    with archive("--bus", bus_url, "--store", store_url, "--health", str(port), cwd=tmp_path) as it:
        async with open_bus(bus_url) as bus, anyio.create_task_group() as tasks:
            worker = Worker(
                bus, name="w", programs={"local:test": Agent(llm=ScriptedModel("done"))}
            )
            tasks.start_soon(worker.run)
            await bus.put(EPISODES_QUEUE, requested)

            async def is_retired() -> bool:
                first = await bus.read(log, limit=1)
                return bool(first) and first[0].seq > 1

            await wait_until(is_retired, 15, "the end of the episode, stored and freed")
            assert "archiver" in {node.kind for node in await bus.nodes()}
            tasks.cancel_scope.cancel()
        health = json.loads(await to_thread.run_sync(get_text, f"http://127.0.0.1:{port}/healthz"))
        assert (health["status"], health["incidents"]) == ("ok", 0)
        metrics = await to_thread.run_sync(get_text, f"http://127.0.0.1:{port}/metrics")
        assert f"aworld_archiver_events_total {health['archived']:.1f}" in metrics.splitlines()
        assert "aworld_janitor_retired_logs_total 1.0" in metrics.splitlines()
        async with open_store(store_url) as store:
            assert (await store.read(log))[-1].type == "episode.finished"
        it.send_signal(signal.SIGTERM)
        assert it.wait(10) == 0


@pytest.mark.slow
async def test_sigterm_lets_it_store_what_is_there(bus_url: str, tmp_path: Path) -> None:
    store_url = f"sqlite:///{tmp_path}/store.db"
    with archive("--bus", bus_url, "--store", store_url, cwd=tmp_path) as it:
        async with open_bus(bus_url) as bus:
            for page in range(20):
                await bus.append("log", page * 100, notes(100))
            it.send_signal(signal.SIGTERM)
            assert await to_thread.run_sync(it.wait, 20) == 0
            assert await archivers(bus) == 0
        async with open_store(store_url) as store:
            assert await store.last_seq("log") == 2000
    told = (tmp_path / "archive.log").read_text()
    assert "draining" in told
    assert "everything is in the store; it copied 2000 events" in told


async def archivers(bus: Bus) -> int:
    return sum(node.kind == "archiver" for node in await bus.nodes())


@pytest.mark.slow
async def test_a_second_signal_ends_it_at_once(bus_url: str, tmp_path: Path) -> None:
    """While another process holds the store, so that nothing can be written."""
    file = tmp_path / "store.db"
    with archive("--bus", bus_url, "--store", f"sqlite:///{file}", cwd=tmp_path) as it:
        holder = sqlite3.connect(file, isolation_level=None)
        holder.execute("BEGIN EXCLUSIVE")
        async with open_bus(bus_url) as bus:
            await bus.append("log", 0, notes(1))
        log = tmp_path / "archive.log"
        it.send_signal(signal.SIGINT)
        await wait_until(lambda: "draining" in log.read_text(), 10, "it drains")
        assert it.poll() is None
        it.send_signal(signal.SIGINT)
        assert await to_thread.run_sync(it.wait, 20) == 130
        assert "Traceback" not in log.read_text()
        holder.close()
