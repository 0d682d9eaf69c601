"""Metrics move by exactly what happened, and are read as Prometheus reads them."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from uuid import uuid4

import anyio
import pytest
from prometheus_client.parser import text_string_to_metric_families

from aworld_runtime import telemetry
from aworld_runtime.archive.archiver import Archiver
from aworld_runtime.bus import Bus, open_bus
from aworld_runtime.bus.server import PrivateServer
from aworld_runtime.cli.health import health_beside, serve_health
from aworld_runtime.errors import ConfigError, Fenced, QueueFullError
from aworld_runtime.events import EpisodeClaimed, Event, MessagePosted
from aworld_runtime.names import episode_log
from aworld_runtime.store.open import open_store
from tests.episodes import adding_program, request_episode, run_episode

pytestmark = pytest.mark.anyio


def message() -> Event:
    return Event.of(MessagePosted(content="hello"), source="solver/1")


@pytest.fixture(scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[PrivateServer]:
    async with PrivateServer(tmp_path_factory.mktemp("bus")) as server:
        yield server


@pytest.fixture(params=["memory", "redis"])
def bus_url(request: pytest.FixtureRequest) -> str:
    if request.param == "memory":
        return "memory://"
    running: PrivateServer = request.getfixturevalue("server")
    return f"{running.url}?namespace={uuid4().hex}"


@pytest.fixture
async def bus(bus_url: str) -> AsyncIterator[Bus]:
    async with open_bus(bus_url) as bus:
        yield bus


def scraped() -> dict[str, float]:
    """What Prometheus reads, by sample name and labels."""
    _, text = telemetry.exposition()
    return {
        ",".join([sample.name, *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


class Moved:
    """By how much each sample has changed since; only those that have."""

    def __init__(self) -> None:
        self._before = scraped()

    def since(self, prefix: str) -> Iterator[tuple[str, float]]:
        for name, value in scraped().items():
            change = value - self._before.get(name, 0)
            if change and name.startswith(prefix) and "seconds" not in name:
                yield name, change


@pytest.fixture
def moved() -> Moved:
    return Moved()


async def test_counters_move_by_exactly_what_happened(bus: Bus, moved: Moved) -> None:
    for last in (0, 2, 4):
        await bus.append("log", last, [message(), message()])
    with pytest.raises(Fenced):
        await bus.append("log", 2, [message()])
    await bus.send_mail("log", message(), message())
    await bus.put("work", message(), message(), message(), message())
    async with bus.consume("work", consumer="c1", credit=8) as consumer:
        taken = [await consumer.take() for _ in range(4)]
        assert scraped()["aworld_bus_held_deliveries,work"] == 4
        await consumer.ack(taken[:2])
        await taken[2].retry(60, "not now")
        await taken[3].dead_letter("never")
        assert scraped()["aworld_bus_held_deliveries,work"] == 0
    assert dict(moved.since("aworld_bus_")) == {
        "aworld_bus_appended_events_total": 6,
        "aworld_bus_fenced_appends_total": 1,
        "aworld_bus_mailed_events_total": 2,
        "aworld_bus_put_events_total": 4,
        "aworld_bus_delivered_events_total": 4,
        "aworld_bus_acked_events_total": 2,
        "aworld_bus_retried_events_total": 1,
        "aworld_bus_dead_letters_total": 1,
    }


async def test_third_failure_is_a_dead_letter_and_no_retry(bus: Bus, moved: Moved) -> None:
    await bus.put("work", message())
    async with bus.consume("work", consumer="c1") as consumer:
        for _ in range(3):
            await (await consumer.take()).retry(0, "again")
    assert dict(moved.since("aworld_bus_re")) == {"aworld_bus_retried_events_total": 2}
    assert dict(moved.since("aworld_bus_dead")) == {"aworld_bus_dead_letters_total": 1}


async def test_lease_that_goes_to_another_consumer_is_counted_once(bus: Bus, moved: Moved) -> None:
    await bus.put("work", message())
    async with (
        bus.consume("work", consumer="dies", lease_s=0.2) as dying,
        bus.consume("work", consumer="lives", lease_s=0.2) as living,
    ):
        first = await dying.take()
        dying.abandon()
        second = await living.take()
        await first.ack()
        await second.ack()
    counts = dict(moved.since("aworld_bus_"))
    assert counts["aworld_bus_lost_leases_total"] == 1
    assert counts["aworld_bus_acked_events_total"] == 1


async def test_appends_to_a_server_are_timed(server: PrivateServer) -> None:
    before = telemetry.APPEND_SECONDS.count()
    async with open_bus(f"{server.url}?namespace=timed") as bus:
        await bus.append("log", 0, [message(), message()])
    assert telemetry.APPEND_SECONDS.count() == before + 1


async def test_broken_connection_is_counted_when_it_is_made_anew(
    server: PrivateServer, moved: Moved
) -> None:
    from redis.asyncio import Redis

    async with (
        open_bus(f"{server.url}?namespace=broken") as bus,
        Redis.from_url(server.url) as admin,
    ):
        await bus.append("log", 0, [message()])
        await admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await bus.append("log", 1, [message()])
    assert dict(moved.since("aworld_bus_rec")) == {"aworld_bus_reconnects_total": 1}


async def test_episode_counts_its_tools_models_and_end(moved: Moved) -> None:
    program, model, _ = adding_program()
    async with open_bus("memory://") as bus:
        await run_episode(bus, request_episode(), program)
    changes = dict(moved.since("aworld_"))
    assert changes["aworld_episodes_finished_total,answered"] == 1
    assert changes["aworld_tool_calls_total,add"] == 3
    assert changes["aworld_tool_calls_total,unknown"] == 1
    assert changes["aworld_tool_failures_total,unknown"] == 1
    assert "aworld_tool_failures_total,add" not in changes
    assert changes[f"aworld_model_calls_total,{model.name}"] == len(model.requests)


async def test_takeover_is_counted_by_the_one_who_takes_over(moved: Moved) -> None:
    program, _, _ = adding_program()
    requested = request_episode()
    claimed = requested.caused(EpisodeClaimed(worker="dead"), source="worker/dead")
    async with open_bus("memory://") as bus:
        await bus.append(episode_log(requested.episode_id or ""), 0, [requested, claimed])
        await run_episode(bus, requested, program)
        await run_episode(bus, requested, program)  # it is finished: nothing happens any more
    assert dict(moved.since("aworld_episode")) == {
        "aworld_episode_takeovers_total": 1,
        "aworld_episodes_finished_total,answered": 1,
    }


async def test_archiver_counts_what_it_copies(tmp_path: Path, moved: Moved) -> None:
    async with (
        open_bus("memory://") as bus,
        open_store(f"sqlite:///{tmp_path}/s.db") as store,
        Archiver(bus, store) as archiver,
    ):
        await bus.append("run:r1", 0, [message(), message()])
        await archiver.drain()
    assert dict(moved.since("aworld_archiver")) == {"aworld_archiver_events_total": 2}


async def test_log_that_cannot_be_archived_is_an_incident(tmp_path: Path, moved: Moved) -> None:
    async with open_store(f"sqlite:///{tmp_path}/s.db") as store:
        await store.put_events("run:r1", [message().at(1)])
        async with open_bus("memory://") as bus, Archiver(bus, store) as archiver:
            await bus.append("run:r1", 0, [message()])
            await archiver.drain()
    assert dict(moved.since("aworld_archiver")) == {"aworld_archiver_incidents_total": 1}


async def test_health_and_metrics_are_served_and_nothing_else() -> None:
    async with anyio.create_task_group() as tasks:
        port = await tasks.start(serve_health, ("127.0.0.1", 0), lambda: {"status": "ok"})

        async def ask(request: str) -> tuple[str, str]:
            async with await anyio.connect_tcp("127.0.0.1", port) as stream:
                await stream.send(f"{request} HTTP/1.1\r\n\r\n".encode())
                reply = b"".join([part async for part in stream]).decode()
            head, _, body = reply.partition("\r\n\r\n")
            return head.splitlines()[0].partition(" ")[2], body

        assert await ask("GET /healthz") == ("200 OK", '{"status": "ok"}')
        status, text = await ask("GET /metrics")
        assert status == "200 OK"
        names = {family.name for family in text_string_to_metric_families(text)}
        assert {metric.name.removesuffix("_total") for metric in telemetry.METRICS} <= names
        assert await ask("HEAD /metrics") == ("200 OK", "")
        assert (await ask("GET /"))[0] == "404 Not Found"
        assert (await ask("POST /metrics"))[0] == "405 Method Not Allowed"
        tasks.cancel_scope.cancel()


def test_what_is_no_event_loop_answers_too() -> None:
    with health_beside(("127.0.0.1", 0), lambda: {"rank": 1}) as port:
        url = f"http://127.0.0.1:{port}/healthz"
        with urllib.request.urlopen(url) as answer:
            assert json.load(answer) == {"rank": 1}
        taken = pytest.raises(ConfigError, match=f"health at 127.0.0.1:{port}: .*in use")
        with taken, health_beside(("127.0.0.1", port), dict):
            pass
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url)


async def test_what_is_refused_for_want_of_room_is_counted(
    server: PrivateServer, moved: Moved
) -> None:
    for url in ("memory://?queue_limit=1", f"{server.url}?queue_limit=1&namespace={uuid4().hex}"):
        async with open_bus(url) as bus:
            await bus.put("work", message())
            with pytest.raises(QueueFullError):
                await bus.put("work", message())
    assert dict(moved.since("aworld_bus_")) == {
        "aworld_bus_put_events_total": 2,
        "aworld_bus_refused_calls_total": 2,
    }


def test_without_the_package_the_error_names_the_extra() -> None:
    code = """
import sys
sys.modules["prometheus_client"] = None
from aworld_runtime.telemetry import exposition
exposition()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=20
    )
    assert done.stderr.splitlines()[-1].endswith("pip install 'aworld-rt[telemetry]'")


def test_every_metric_is_named_as_prometheus_names_it_and_explained() -> None:
    for metric in telemetry.METRICS:
        assert metric.name.startswith("aworld_")
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert metric.help.endswith("."), metric.name
    assert len({metric.name for metric in telemetry.METRICS}) == len(telemetry.METRICS)


def table() -> str:
    """What docs/observability.md says of the metrics."""
    rows = ["| metric | kind | labels | what it is |", "|---|---|---|---|"]
    for metric in telemetry.METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        rows.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
    return "\n".join(rows)


def test_documentation_lists_exactly_these_metrics() -> None:
    page = (Path(__file__).parents[2] / "docs" / "observability.md").read_text()
    assert table() in page, f"put this into docs/observability.md:\n{table()}"
