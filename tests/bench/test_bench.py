"""`aworld bench`: its figures fit together, and its verification sees what is wrong. How fast it is, is not asserted."""

import json
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from aworld_runtime.bench.backpressure import Numbers, least_squares
from aworld_runtime.bench.bus import with_option
from aworld_runtime.bench.compare import PEERS, SCRIPTS
from aworld_runtime.bench.cost import Meter
from aworld_runtime.bench.fork import Forked
from aworld_runtime.bench.fork import faults_of as fork_faults
from aworld_runtime.bench.latency import percentile
from aworld_runtime.bench.load import Load, Writer, rounds
from aworld_runtime.bench.long_log import Relay, relay_events
from aworld_runtime.bench.progress import Progress
from aworld_runtime.bench.raw import raw_server
from aworld_runtime.bench.replay import Live, call_seconds, duration_s, faults_of
from aworld_runtime.bench.throughput import ThroughputPhase
from aworld_runtime.bench.verify import check_deliveries, check_log
from aworld_runtime.bus import open_bus
from aworld_runtime.bus.server import PrivateServer
from aworld_runtime.events import (
    EpisodeClaimed,
    EpisodeFinished,
    EpisodeForked,
    EpisodeRequested,
    EpisodeResumed,
    EpisodeTakenOver,
    Event,
    EventData,
    HumanAnswered,
    HumanAsked,
    MessagePosted,
    Registry,
    utc_now,
)
from aworld_runtime.messages import Task
from aworld_runtime.replay.replay import replay
from aworld_runtime.store.base import EpisodeRecord
from aworld_runtime.store.open import open_store
from tests.services import BusCluster

ROOT = Path(__file__).parents[2]
SMALL = ("--events", "2000", "--seconds", "0.5")


def bench(*arguments: str, code: int | None = 0) -> Any:
    """Run `aworld bench … --json`; what it reports. `code` None: any exit code."""
    command = [sys.executable, "-m", "aworld_runtime.cli", "bench", *arguments, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert code is None or done.returncode == code, done.stderr
    return json.loads(done.stdout) if done.stdout else None


def numbered(count: int) -> list[Event]:
    writer = Writer()
    return [writer.event("e", "role000").at(seq) for seq in range(1, count + 1)]


def timed(*data: tuple[float, EventData]) -> list[Event]:
    """Events of these seconds."""
    start = utc_now()
    events = [
        Event.of(payload, source="x/y", time=start + timedelta(seconds=at)) for at, payload in data
    ]
    return [event.at(seq) for seq, event in enumerate(events, 1)]


def ids(events: Sequence[Event]) -> list[str]:
    return [event.id for event in events]


def check_bus_report(report: Any) -> None:
    assert report["verified"] is True
    assert report["faults"] == []
    assert report["events"] == 2000
    assert report["bytes"] == 1024
    cpu_s = report["cpu_s"]["client"] + report["cpu_s"]["server"]
    assert report["events_per_core_second"] == pytest.approx(report["events"] / cpu_s)
    assert report["events_per_second"] == pytest.approx(report["events"] / report["wall_s"])
    assert 0 < report["p50_ms"] <= report["p99_ms"]
    assert report["latency"]["samples"] == pytest.approx(500, abs=50)
    assert len(report["holds"]) == 3


def test_memory_bus_is_measured_and_verified() -> None:
    report = bench("bus", "--url", "memory://", *SMALL)
    check_bus_report(report)
    assert report["cpu_s"]["server"] == 0
    assert report["raw_p99_ms"] is None
    assert "no server" in report["ceiling"]["reason"]


async def test_redis_bus_is_measured_beside_redis_py_and_leaves_nothing(tmp_path: Path) -> None:
    from redis.asyncio import Redis

    async with PrivateServer(tmp_path) as server:
        report = bench("bus", "--url", server.url, *SMALL)
        async with Redis.from_url(server.url) as client:
            assert await client.dbsize() == 0
    check_bus_report(report)
    assert report["cpu_s"]["server"] > 0
    assert 0 < report["raw_p50_ms"] <= report["raw_p99_ms"]
    ceiling = report["ceiling"]
    assert ceiling["reason"] or ceiling["per_core_second"] > 0


@pytest.mark.slow
async def test_cluster_is_measured_with_the_cpu_time_of_all_its_nodes_and_keeps_nothing(
    tmp_path: Path,
) -> None:
    async with BusCluster(tmp_path) as cluster:
        report = bench("bus", "--url", cluster.url, *SMALL)
        used = 0.0
        for node in range(3):
            async with cluster.client(node) as client:
                assert await client.dbsize() == 0
                cpu = await client.info("cpu")
                used += cpu["used_cpu_user"] + cpu["used_cpu_sys"]
        async with raw_server(cluster.url) as server:
            assert await server.cpu_s() >= used
    check_bus_report(report)
    assert report["server"].endswith(", 3 nodes")


def test_peer_that_is_not_installed_says_what_to_install() -> None:
    report = bench(
        "bus", "--url", "memory://", *SMALL, "--peers", "nats", "--peers-python", sys.executable
    )
    (peer,) = report["peers"]
    assert peer["name"] == "nats"
    assert peer["events_per_core_second"] is None
    assert "scripts/bench-peers" in peer["reason"]


def test_every_peer_has_its_script() -> None:
    for peer in PEERS.values():
        assert (SCRIPTS / f"{peer.script}.py").is_file()


def test_unknown_peer_is_named() -> None:
    assert bench("bus", "--peers", "kafka", code=2) is None


def test_idle_episodes_are_weighed_and_end_with_their_answers() -> None:
    report = bench("idle", "--roles", "20", "--episodes", "30")
    assert report["verified"] is True
    assert report["episodes"] == 30
    assert report["kb_per_episode"] > 0
    assert report["joins"] == report["leaves"] > 1


def test_slow_consumer_slows_its_publishers_and_misses_nothing() -> None:
    report = bench("backpressure", "--seconds", "2", "--rate", "2000", "--limit", "200")
    assert report["verified"] is True
    assert report["refused"] > 0
    assert report["put"] == report["consumed"] > 0
    assert report["backlog_max"] <= 200 + report["pressure"]["batch"]
    assert report["samples"] >= 2


def test_episodes_with_all_that_is_hard_to_replay_are_recorded_and_replay_identically() -> None:
    report = bench("replay", "--episodes", "6", code=None)  # so few may not be 50 times as fast
    assert (report["identical"], report["different"], report["live_calls"]) == (6, 0, 0)
    assert all(report["kinds"].values()), report["kinds"]
    assert report["shortest_call_s"] >= 0.2
    assert report["handlers"] > 60
    assert report["ratio"] == pytest.approx(report["live_s"] / report["replay_s"])
    assert report["live_s"] > report["live_wall_s"] > 0
    assert [fault for fault in report["faults"] if "times as fast" not in fault] == []


async def test_replay_of_a_store_that_has_episodes_already_is_not_measured(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'bench.db'}"
    async with open_store(url) as store:
        await store.put_episode(EpisodeRecord(id="e1"))
    assert bench("replay", "--store", url, code=2) is None


def test_duration_of_an_episode_is_without_the_wait_for_another_worker() -> None:
    events = timed(
        (0, EpisodeRequested(task=Task(id="t", prompt=""), program="m:a")),
        (10, EpisodeClaimed(worker="a")),
        (11, EpisodeResumed()),
        (14, EpisodeTakenOver(worker="b")),
        (16, EpisodeFinished()),
    )
    assert duration_s(events) == 3


def test_call_takes_from_its_question_to_its_answer() -> None:
    asked, answered = timed((1, HumanAsked(question="?")), (3, HumanAnswered(answer="yes")))
    answered = answered.model_copy(update={"correlation_id": asked.id})
    assert list(call_seconds([asked, answered])) == [2]


def test_replay_that_differs_or_is_slow_or_misses_a_kind_is_a_fault() -> None:
    live = Live(
        episodes=2,
        events=9,
        kinds={"handoffs": 2, "takeovers": 0},
        calls=3,
        shortest_call_s=0.2,
        live_s=9,
    )
    told: dict[str, Any] = {
        "identical": 1,
        "live_calls": 0,
        "unreadable": {},
        "episodes": [
            {"episode": "e1", "identical": True},
            {"episode": "e2", "identical": False, "divergence": {"message": "at seq 3 …"}},
        ],
    }
    assert list(faults_of(live, told, episodes=2, ratio=49)) == [
        "no episode had takeovers: nothing is known of their replay; run more --episodes",
        "e2 differs: at seq 3 …",
        "1 of 2 episodes are identical",
        "the replay is only 49.0 times as fast as the live runs",
    ]


def test_fork_of_a_long_log_keeps_two_events_and_goes_on() -> None:
    report = bench("fork", "--events", "2000", code=None)  # a busy machine may take 100 ms
    assert report["kept_events"] == 2
    assert {1, 1000, 2000} < {fork["at"] for fork in report["forks"]}
    assert report["p50_ms"] <= report["max_ms"] == max(fork["ms"] for fork in report["forks"])
    assert [went["at"] for went in report["went_on"]] == [1, 1000, 2000]
    assert all(0 < went["claimed_s"] <= went["handled_s"] for went in report["went_on"])
    assert [fault for fault in report["faults"] if not fault.startswith("a fork took")] == []


async def test_long_log_is_what_its_program_appends() -> None:
    events = list(islice(relay_events("e1"), 200))
    assert [event.seq for event in events] == list(range(1, 201))
    report = await replay(events, Relay().program())
    assert (report.identical, report.handlers) == (True, 66)


def test_fork_that_keeps_more_than_its_own_or_touches_its_parent_is_a_fault() -> None:
    forked, requested, more = timed(
        (0, EpisodeForked(parent="episode:e", at=4)),
        (0, EpisodeRequested(task=Task(id="t", prompt=""), program="m:a")),
        (0, MessagePosted(content="copied")),
    )
    own = [forked.at(5), requested.at(6)]
    fork = Forked(id="f", at=4, ms=1)
    assert fork_faults([fork], [own], 9, 9) == []
    extra, touched = fork_faults([fork], [[*own, more.at(7)]], 10, 9)
    assert "(7, 'message.posted')" in extra
    assert touched == "the log that was forked ends at 10, and ended at 9"


async def test_load_goes_through_the_whole_contract_and_is_counted_once() -> None:
    load = Load(events=200, roles=2, episodes=10, batch=5)
    meter = Meter()
    async with open_bus("memory://", Registry()) as bus:
        found = await ThroughputPhase(bus, load, meter, Progress()).run()
        assert [await bus.backlog(f"bench:role00{role}") for role in (0, 1)] == [0, 0]
    assert (found.events, found.redelivered, found.faults) == (200, 0, ())
    assert found.per_core_second == 200 / meter.cpu.total


def test_event_that_was_not_acknowledged_is_a_fault() -> None:
    assert check_deliveries("solver", ["a", "b"], ["b"]) == [
        "solver: 1 of 2 events were not acked: a"
    ]
    assert check_deliveries("solver", ["a"], ["a", "c"]) == [
        "solver: 1 events that nobody put for it: c"
    ]


def test_whole_log_has_no_faults() -> None:
    events = numbered(5)
    assert check_log("log", ids(events), events) == []


def test_gap_in_a_log_is_a_fault() -> None:
    events = numbered(5)
    faults = check_log("log", ids(events), [*events[:2], *events[3:]])
    assert f"log: 1 of 5 events are missing: {events[2].id}" in faults
    assert "log: seq 4 stands where 3 belongs" in faults


def test_event_that_stands_twice_in_a_log_is_a_fault() -> None:
    events = numbered(3)
    assert "log: 1 events stand in it twice" in check_log(
        "log", ids(events), [*events, events[0].at(4)]
    )


def test_events_in_another_order_are_a_fault() -> None:
    events = numbered(3)
    found = [event.at(seq) for seq, event in enumerate(reversed(events), 1)]
    assert check_log("log", ids(events), found) == [
        "log: its events stand in another order than they were appended"
    ]


def test_event_that_nobody_appended_is_a_fault() -> None:
    events = numbered(3)
    faults = check_log("log", ids(events[:2]), events)
    assert faults == [f"log: 1 events that nobody appended: {events[2].id}"]


def test_number_that_never_comes_is_a_fault_and_one_that_comes_again_is_counted() -> None:
    numbers, writer = Numbers(), Writer()
    for number in (1, 2, 2, 5):
        numbers.add(writer.event(str(number), "slow"))
    assert (numbers.consumed, numbers.redelivered) == (3, 1)
    assert numbers.faults == ["events 3 to 4 of owner/bench never came"]


def test_events_of_the_load_are_a_kilobyte_as_they_are_sent() -> None:
    (first,) = rounds(Load(events=100, episodes=10), Writer())
    turns = [turn for script in first.scripts for turn in script.turns]
    assert {len(Registry().encode(event)) for turn in turns for event in turn.events} == {1024}


def test_slope_is_that_of_the_nearest_line() -> None:
    assert least_squares([0, 1, 2, 3], [5, 7, 9, 11]) == pytest.approx(2)
    assert least_squares([0, 1, 2, 3], [1, -1, -1, 1]) == pytest.approx(0)
    assert least_squares([1], [7]) == 0


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(number) for number in range(1, 101)]
    assert (percentile(values, 50), percentile(values, 99)) == (50, 99)


def test_option_of_a_bus_url_is_added_beside_the_others() -> None:
    assert with_option("redis://h:1/0?a=b", "c", "d") == "redis://h:1/0?a=b&c=d"
    assert with_option("unix:///run/x", "c", "d") == "unix:///run/x?c=d"
