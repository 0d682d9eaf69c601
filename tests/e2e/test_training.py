"""A whole training run, as a user starts it: what it makes, what it leaves, what it refuses."""

# transformers is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
import shutil
import signal
import socket
import time
import urllib.request
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from aworld_runtime.bus.server import PrivateServer
from aworld_runtime.events import NodeJoined
from aworld_runtime.runtime import run_sync
from aworld_runtime.training.config import TrainConfig
from aworld_runtime.training.run_folder import RunFolder
from aworld_runtime.training.train import with_store
from tests.e2e.conftest import NewRun
from tests.e2e.training_run import TrainingRun, training_run
from tests.services import mongo_server, with_database

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

FILES = {
    "config.yaml",
    "provenance.json",
    "metrics.jsonl",
    "report.json",
    "report.html",
    "sft.jsonl",
    "preferences.jsonl",
    "rollouts.parquet",
    "checkpoints",
    "log",
    "model",
}
NOBODY = "127.0.0.1:9"
"""Where nothing listens: the discard port."""


@dataclass(frozen=True)
class Finished:
    """A run that has ended by itself."""

    run: TrainingRun
    code: int
    kinds: set[str]
    """Of the nodes that `aworld nodes` listed meanwhile."""
    metrics: dict[str, str]
    """What launcher, learner and sampler answered at `/metrics` meanwhile."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Finished]:
    """One run for all tests that only look at what it left."""
    place, health = tmp_path_factory.mktemp("training"), two_free_ports()
    with training_run(place / "run", tiny_model, health_port=health) as run:
        run.start()
        run_sync(run.until_told, "step 1/3")
        nodes = run.command("nodes", "--bus", run.wiring.bus, "--json").stdout.splitlines()
        kinds = {json.loads(node)["kind"] for node in nodes}
        ports = {"launcher": health, "learner": health + 1, "sampler": run.wiring.sampler_port}
        metrics = {name: metrics_at(port) for name, port in ports.items()}
        yield Finished(run, run_sync(run.finish), kinds, metrics)


def two_free_ports() -> int:
    """The first of two, one after the other."""
    while True:
        with socket.socket() as first, socket.socket() as second, suppress(OSError, OverflowError):
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            second.bind(("127.0.0.1", port + 1))
            return port


def metrics_at(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        return answer.read().decode()


async def test_a_run_ends_by_itself_with_each_episode_counted_once(finished: Finished) -> None:
    assert finished.code == 0, finished.run.told()
    await finished.run.no_process_left()
    state = await finished.run.assert_counted_once()
    assert state.published == 3


def test_its_folder_holds_the_files_of_the_design(finished: Finished) -> None:
    folder = finished.run.path
    assert {path.name for path in folder.iterdir()} >= FILES
    report = json.loads((folder / "report.json").read_text())
    assert report["status"] == "done"
    assert (folder / "report.html").read_text().startswith("<!")


def test_its_steps_can_be_taken_again_bit_for_bit(finished: Finished) -> None:
    run = finished.run
    again = run.command("replay-step", "--all", "--store", run.store, "--json", timeout=60)
    assert again.returncode == 0, again.stderr + again.stdout
    steps = json.loads(again.stdout)["steps"]
    assert [(step["identical"], step["tolerance"]) for step in steps] == [(True, None)] * 3


def test_only_its_owner_can_read_where_its_servers_are(finished: Finished) -> None:
    modes = {
        name: (finished.run.path / name).stat().st_mode for name in ("config.yaml", "wiring.json")
    }
    assert {name: mode & 0o777 for name, mode in modes.items()} == dict.fromkeys(modes, 0o600)


def test_its_model_can_be_read_by_those_whom_the_umask_lets(finished: Finished) -> None:
    others = finished.run.folder.report.stat().st_mode
    assert {file.stat().st_mode for file in finished.run.folder.model.iterdir()} == {others}


def test_its_store_is_the_same_from_everywhere(new_run: NewRun) -> None:
    config = TrainConfig(store="sqlite:///here/a%20b.db")
    folder = RunFolder.create(new_run().path, with_store(config), "r", ["redis://:secret@host"])
    assert folder.config.store == f"sqlite:///{Path.cwd()}/here/a%20b.db"
    assert folder.provenance["command"] == ["redis://:***@host"]


def test_its_model_loads_in_transformers_and_has_learned(
    finished: Finished, tiny_model: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = finished.run.path / "model"
    trained = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    assert AutoTokenizer.from_pretrained(folder).decode([1]) == "<|im_start|>"
    moved = (trained.lm_head.weight - before.lm_head.weight).abs().max().item()
    assert 1e-3 < moved < 1e-2  # three steps of Adam with a rate of 1e-3


def test_its_nodes_were_on_the_bus(finished: Finished) -> None:
    assert finished.kinds >= {"worker", "tool", "environment", "trainer", "sampler", "launcher"}


@pytest.mark.parametrize(
    "part, metric",
    [
        ("launcher", "aworld_archiver_events_total"),
        ("learner", "aworld_policy_version"),
        ("learner", "aworld_learner_step_seconds_count"),
        ("learner", "aworld_bus_appended_events_total"),
        ("sampler", "aworld_sampler_tokens_total"),
    ],
)
def test_its_parts_told_how_they_do(finished: Finished, part: str, metric: str) -> None:
    values = dict(line.split(" ") for line in finished.metrics[part].splitlines() if line[0] != "#")
    assert float(values[metric]) >= 1


def test_its_counts_are_shown(finished: Finished) -> None:
    run, store = finished.run, ("--store", finished.run.store)
    counts = "requested 30, finished 30, lost 0, counted twice 0"  # 3 x 8 to train, 3 x 2 held out
    assert counts in run.command("status", "last", *store).stdout
    listed = json.loads(run.command("runs", *store, "--json").stdout)
    assert (listed["id"], listed["reason"], listed["twice"]) == (run.folder.run_id, "done", 0)


def test_its_episodes_replay_identically_without_a_live_call(finished: Finished) -> None:
    run = finished.run
    of_run = ("--run", run.folder.run_id, "--limit", "10", "--store", run.store)
    replayed = run.command("replay", *of_run)
    assert replayed.returncode == 0, replayed.stdout
    assert "identical 10, different 0, unreadable 0, live_calls 0" in replayed.stdout


def test_another_run_in_its_folder_is_refused(finished: Finished) -> None:
    run = finished.run
    again = run.command(
        "train",
        "task=tests.e2e.vowels:VOWELS",
        f"out={run.path}",
        "--model",
        str(run.settings["model"]),
    )
    assert again.returncode == 2
    assert f"holds another run; continue it with --resume {run.path}" in again.stderr


def test_a_bus_that_lost_it_is_told_before_anything_starts(
    finished: Finished, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(finished.run.path, copy, ignore=shutil.ignore_patterns("bus"))
    lost = finished.run.command("train", "--resume", str(copy))
    assert lost.returncode == 1
    events = len(run_sync(finished.run.log))
    assert f"the bus has lost this run (0 of {events} events); start a new one" in lost.stderr
    assert f"what is left of it: {copy}/model, {copy}/checkpoints" in lost.stdout
    assert "sampler" not in lost.stdout


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.fixture
def taken() -> Generator[int]:
    """A port that somebody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def refusal(run: TrainingRun, *arguments: str) -> str:
    """What a command that can't begin says: one line, soon, and nothing is left of it."""
    began = time.monotonic()
    given = [f"{key}={value}" for key, value in run.settings.items()]
    done = run.command("train", *given, *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert time.monotonic() - began <= 5
    assert len(done.stderr.splitlines()) == 1
    assert not run.path.exists()
    assert not run.processes()
    return done.stderr


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--task", "chess"], "known tasks: calculator"),
        (["--task", "tests.e2e.vowels:NOWHERE"], "has no attribute 'Nowhere'"),
        (["--task", "tests.e2e.vowels:MISCAST"], "trains critic, but 'tests.e2e.vowels:build' has"),
        (["--worker_num", "0"], "worker_num=0: Input should be greater than or equal to 1"),
        (["grup_size=8"], "unknown key 'grup_size'; known keys: attempts, "),
        (["learner.rate=1"], "unknown key 'learner.rate'; known keys: "),
        (["--bus", f"redis://{NOBODY}"], f"no bus at redis://{NOBODY}"),
        (["--bus", "memory://"], "give a server's URL, or none for a private server"),
        (["--store", f"mongodb://{NOBODY}/x"], NOBODY),
        (["--model", "/dev"], "/dev is no model: it lacks config.json"),
        (["--model", "gpt"], "'gpt' is neither 'smollm2' nor a folder"),
        (["--sampler", "llama"], "sampler='llama'"),
        (["sampler_host=0.0.0.0"], "sampler_host='0.0.0.0': is no address of this machine's"),
        (["sampler_host=192.0.2.1"], "sampler_host='192.0.2.1': is no address of this machine's"),
    ],
)
def test_wrong_input_is_one_line_and_leaves_nothing(
    new_run: NewRun, arguments: Sequence[str], message: str
) -> None:
    assert message in refusal(new_run(), *arguments)


@pytest.mark.parametrize("key", ["bus_port", "sampler_port", "health_port"])
def test_a_taken_port_is_refused(new_run: NewRun, taken: int, key: str) -> None:
    assert f"{key}={taken}: another program has this port" in refusal(new_run(), f"{key}={taken}")


def test_a_folder_with_something_else_in_it_is_refused(new_run: NewRun, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").touch()
    run = new_run()
    done = run.command("train", *(f"{key}={value}" for key, value in run.settings.items()))
    assert done.returncode == 2
    assert "is not an empty folder" in done.stderr


def test_nothing_to_resume_is_said(new_run: NewRun, tmp_path: Path) -> None:
    done = new_run().command("train", "--resume", str(tmp_path / "nowhere"))
    assert done.returncode == 2
    assert "holds no run" in done.stderr


# --- on servers and workers of one's own ----------------------------------------------------------------------------


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[tuple[str, str]]:
    """URLs of a bus and a MongoDB store."""
    async with PrivateServer(tmp_path / "bus") as bus, mongo_server(tmp_path / "mongo") as mongo:
        yield bus.url, with_database(mongo, "training")


async def test_a_run_on_named_servers_with_workers_elsewhere_and_two_ranks(
    new_run: NewRun, servers: tuple[str, str]
) -> None:
    bus, store = servers
    run = new_run(bus=bus, store=store, external_workers=True, learner_ranks=2)
    workers = [run.start_worker(bus, name) for name in ("near", "far")]
    run.start()
    assert await run.finish() == 0, run.told()
    await run.assert_counted_once()
    joined = [e.data.node for e in await run.log() if isinstance(e.data, NodeJoined)]
    assert {*joined} == {"worker/far", "worker/near"}
    for worker in workers:
        assert worker.poll() is None  # they go on, for the next run
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(timeout=10) == 0
    await run.no_process_left()
