"""The command line, as processes: exit codes, messages, what it prints."""

import base64
import json
import os
import re
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import pytest
from anyio import create_task_group, to_thread
from redis.asyncio import Redis

from aworld_runtime import Agent, cli
from aworld_runtime.bus.base import NodeInfo
from aworld_runtime.bus.open import open_bus
from aworld_runtime.bus.redis.entries import BODY
from aworld_runtime.bus.redis.keys import Keys
from aworld_runtime.bus.server import PrivateServer, find_server_binary
from aworld_runtime.cli.command_line import COMMANDS, GROUPS
from aworld_runtime.cli.counts import count
from aworld_runtime.cli.side_by_side import side_by_side
from aworld_runtime.cli.verdict import judge
from aworld_runtime.errors import ConfigError
from aworld_runtime.events import (
    EpisodeCancelled,
    EpisodeFinished,
    EpisodeRequested,
    EvaluationFinished,
    Event,
    EventData,
    GroupCompleted,
    GroupRequested,
    MessagePosted,
    NodeJoined,
    NodeLeft,
    RunFinished,
    RunStarted,
    RunTakenOver,
    StepFinished,
    ToolCalled,
    ToolReturned,
    utc_now,
)
from aworld_runtime.messages import Task, ToolCall
from aworld_runtime.models.scripted import ScriptedModel
from aworld_runtime.names import episode_log, run_log, tool_queue
from aworld_runtime.runtime import Runtime, run_sync
from aworld_runtime.store.base import EpisodeRecord, RunRecord
from aworld_runtime.store.open import open_store
from aworld_runtime.version import code_version
from tests.commands import get_text, serving
from tests.runtime.test_questions import asked
from tests.services import missing
from tests.waiting import wait_until, wait_until_sync

STORE = "sqlite:///.aworld/aworld.db"
ROOT = Path(__file__).parents[2]
PROJECT = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.replayed import changed_swarm, dice, summing_agent, swarm
from tests.episodes import Adder
tools = [Adder]
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a module `mine`."""
    (tmp_path / "mine.py").write_text(PROJECT)
    return tmp_path


@dataclass(frozen=True)
class Done:
    """What a command left."""

    returncode: int
    stdout: str
    stderr: str


class Aworld(Protocol):
    def __call__(self, *arguments: str) -> Done: ...


@pytest.fixture
def aworld(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Aworld:
    """Runs a command in this process, in the project's folder."""
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "path", [str(project), *sys.path])
    for name in [name for name in os.environ if name.startswith("AWORLD_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "160")  # whatever terminal the tests run in

    def call(*arguments: str) -> Done:
        capsys.readouterr()
        code = cli.main(arguments)
        printed = capsys.readouterr()
        return Done(code, printed.out, printed.err)

    return call


def aworld_process(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "aworld_runtime.cli", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=30)


def test_help_is_quick_names_every_command_and_imports_nothing_heavy(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = aworld_process("--help", cwd=tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5
    assert done.returncode == 0
    assert re.findall(r"^  (\S+) +\w", done.stdout, re.MULTILINE) == list(COMMANDS)
    assert len(COMMANDS) == sum(map(len, GROUPS.values()))
    code = "import sys; from aworld_runtime import cli; cli.main(['--help']);"
    code += "print(sorted({'pydantic', 'torch', 'redis', 'anyio'} & set(sys.modules)))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert loaded.stdout.splitlines()[-1] == "[]"


def test_another_package_adds_a_command_and_takes_none_of_ours(
    aworld: Aworld, project: Path
) -> None:
    (project / "greeting.py").write_text(
        "def add_arguments(parser): parser.add_argument('name')\n"
        "def greet(arguments): print('hello', arguments.name); return 3\n"
    )
    facts = project / "greetings-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: greetings\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(
        "[aworld.commands]\ngreet = greeting:greet\nrun = greeting:greet\n"
    )
    assert re.search("^  greet +from greetings$", aworld("--help").stdout, re.MULTILINE)
    greeted = aworld("greet", "you")
    assert (greeted.returncode, greeted.stdout) == (3, "hello you\n")
    assert aworld("run", "you").returncode == 2


@pytest.mark.parametrize(
    "command", ["run", "runs", "log", "replay", "worker", "archive", "nodes", "train"]
)
def test_each_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main([command, "--help"])
    assert left.value.code == 0
    assert f"aworld {command}" in capsys.readouterr().out


def test_version_names_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == code_version()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["rnus"], "unknown command 'rnus'; did you mean 'runs'?"),
        (["run", "nowhere:solver", "q"], "can't import 'nowhere'"),
        (["run", "solver", "q"], "expected module:attribute"),
        (["run", "mine:nothing", "q"], "has no attribute 'nothing'"),
        (["run", "mine:tools", "q"], "expected an agent, a swarm or a function"),
        (["run", "mine:dice", "q", "--store", "oracle://x"], "unknown scheme 'oracle'"),
        (["run", "mine:dice", "q", "--slots", "0"], "no other process can run it"),
        (["runs"], "nothing has run here yet"),
        (["log", "last"], "nothing has run here yet"),
        (["nodes"], "memory://' is inside one process"),
        (["worker"], "memory://' is inside one process"),
        (["archive"], "memory://' is inside one process"),
        (["cancel", "last"], "memory://' is inside one process"),
        (["worker", "--slots", "0"], "--slots 0: expected 1 or more"),
        (["replay", "x", "--all"], "one of them"),
        (["replay", "--program", "mine:nothing"], "has no attribute 'nothing'"),
        (["replay", "--all", "--limit", "0"], "--limit 0: expected 1 or more"),
        (["runs", "--run", "last", "--episodes"], "one of them"),
        (["runs", "--limit", "0"], "--limit 0: expected 1 or more"),
        (["runs", "--run", "last", "--limit", "-1"], "--limit -1: expected 1 or more"),
        (["cancel"], "required: EPISODE|RUN; see: aworld cancel --help"),
        (["worker", "--slots", "many"], "invalid int value: 'many'; see: aworld worker --help"),
        (["dead-letter", "show"], "required: QUEUE, ID; see: aworld dead-letter show --help"),
        (["worker", "--bus", "redis://h", "--tools", "mine:swarm"], "a Swarm is no tool"),
        (["worker", "--health", "here"], "--health here: expected PORT or HOST:PORT"),
        (["otel", "--health", "9100"], "--health: give it with --follow"),
        (["nodes", "--bus", "redis://h?queue_limit=all"], "queue_limit=all: expected a number"),
        (["nodes", "--bus", "redis://h?outage_s=nan"], "outage_s=nan: expected a number"),
        (["dead-letter"], "required: list|show|requeue|drop; see: aworld dead-letter --help"),
        (["bench"], "required: bus|backpressure|idle|replay|fork; see: aworld bench --help"),
        (["nodes", "--bus", "localhost:6379"], "expected a URL such as redis://HOST:PORT"),
        (["nodes", "--bus", "redis:/h"], "server '': expected redis://HOST:PORT"),
        (["nodes", "--bus", "redis://h:port"], "server 'h:port': expected redis://HOST:PORT"),
        (["nodes", "--bus", "redis+cluster://"], "server '': expected redis+cluster://HOST:PORT"),
        (["nodes", "--bus", "redis://h/mine"], "database 'mine': expected a number"),
    ],
)
def test_a_usage_error_is_one_line_and_exit_code_2(
    aworld: Aworld, arguments: list[str], message: str
) -> None:
    done = aworld(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("aworld: error: ")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments, needs",
    [
        (["nodes", "--bus", "redis://h"], "bus 'redis://h' needs the extra 'redis'"),
        (["runs", "--store", "mongodb://h/d"], "store 'mongodb://h/d' needs the extra 'mongo'"),
        (["acl"], "access lists need the extra 'redis'"),
        (["chaos"], "chaos needs the extra 'redis'"),
    ],
)
def test_a_command_names_the_extra_that_is_missing(arguments: list[str], needs: str) -> None:
    code = "import sys; sys.modules['redis'] = sys.modules['pymongo'] = None;"
    code += "from aworld_runtime import cli; sys.exit(cli.main())"
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 2, done.stderr
    assert needs in done.stderr
    assert "pip install 'aworld-rt[" in done.stderr


def test_an_action_takes_the_log_flags_of_its_command(aworld: Aworld) -> None:
    for flags in (["--log-format", "json", "list"], ["list", "--log-format", "json"]):
        done = aworld("dead-letter", *flags, "--bus", "redis://127.0.0.1:1")
        assert done.stderr.startswith("aworld: error: no bus at redis://127.0.0.1:1")


def test_wrong_environment_setting_is_named(
    aworld: Aworld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWORLD_STORE", "oracle://x")
    done = aworld("runs")
    assert done.returncode == 2
    assert "oracle" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["nodes", "--bus", "redis://127.0.0.1:1"],
        ["worker", "--bus", "redis://127.0.0.1:1"],
        ["run", "mine:dice", "q", "--bus", "redis://127.0.0.1:1"],
        ["runs", "--store", "mongodb://127.0.0.1:1/x"],
    ],
)
def test_an_unreachable_server_is_reported_within_five_seconds(
    project: Path, arguments: list[str]
) -> None:
    """In processes of their own: PyMongo leaves a socket to the garbage collector."""
    start = time.monotonic()
    done = aworld_process(*arguments, cwd=project)
    assert time.monotonic() - start < 7  # five, and the start of Python on a busy machine
    assert done.returncode == 2
    assert done.stderr.startswith("aworld: error: ")
    assert "127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr


def test_run_log_replay(aworld: Aworld) -> None:
    done = aworld("run", "mine:swarm", "Add it all")
    assert (done.returncode, done.stdout, done.stderr) == (0, "checked: 100\n", "")

    listed = aworld("runs", "--run", "last")
    assert "requested 1, finished 1, lost 0, counted twice 0" in listed.stdout
    runs = json.loads(aworld("runs", "--json").stdout)
    assert (runs["requested"], runs["finished"], runs["by_reason"]) == (1, 1, {"answered": 1})
    status = aworld("status")
    assert f"run       {runs['id']} (run)" in status.stdout

    log = aworld("log")
    assert re.search(r"│  ├─ add\(a=10, b=20\) +0\.\d\d s  → 30\n", log.stdout)
    assert re.search(r" answered 'checked: 100' · .* · 2 agents · 4 turns", log.stdout)
    events = [json.loads(line) for line in aworld("log", "--json").stdout.splitlines()]
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    followed = aworld("log", events[0]["episode_id"], "--follow")
    assert followed.stdout == log.stdout
    assert "run.started" in aworld("log", runs["id"]).stdout

    replayed = aworld("replay", "last")
    assert replayed.returncode == 0
    assert f"identical, 10 handlers, {len(events)} events\n" in replayed.stdout
    assert "identical 1, different 0, unreadable 0, live_calls 0" in replayed.stdout


def test_a_log_is_listed_event_by_event_where_that_is_asked_for(aworld: Aworld) -> None:
    aworld("run", "mine:swarm", "Add it all")
    assert re.search(
        r"^ +\d+ +0\.\d+  solver +tool\.called +add\(a=10, b=20\)$",
        aworld("log", "--events").stdout,
        re.MULTILINE,
    )

    def types(*arguments: str) -> list[str]:
        return [line.split()[3] for line in aworld("log", *arguments).stdout.splitlines()]

    handled = "delivery.handled"
    assert handled not in types("--events")
    assert set(types("--all")) == {*types("--events"), handled}
    assert types("--where", "type=tool.called and data.name=add") == ["tool.called"] * 3
    assert set(types("--where", handled)) == {handled}
    chosen = aworld("log", "--json", "--where", "tool.failed").stdout.splitlines()
    assert [json.loads(event)["type"] for event in chosen] == ["tool.failed"]
    wrong = aworld("log", "--where", "type=")
    assert wrong.returncode == 2
    assert len(wrong.stderr.splitlines()) == 1


def test_the_beginning_of_an_id_names_its_episode(aworld: Aworld) -> None:
    for question in ("Add it all", "Add it all again"):
        aworld("run", "mine:swarm", question)
    listed = [json.loads(line) for line in aworld("runs", "--json").stdout.splitlines()]
    runs = [json.loads(aworld("runs", "--run", run["id"], "--json").stdout) for run in listed]
    one, other = (run["episodes"][0]["id"] for run in runs)
    every = aworld("runs", "--episodes").stdout.splitlines()
    assert [line.split()[:2] for line in every[1:]] == [[one, "answered"], [other, "answered"]]
    short = one[
        : next(n for n, pair in enumerate(zip(one, other, strict=True), 1) if len({*pair}) > 1)
    ]
    assert aworld("log", short).stdout == aworld("log", one).stdout
    assert f"{one}  identical" in aworld("replay", short).stdout
    several = aworld("log", short[:-1])
    assert several.returncode == 2
    assert several.stderr.startswith("aworld: error: ")
    assert one in several.stderr
    assert other in several.stderr
    assert len(several.stderr.splitlines()) == 1


def test_a_run_whose_id_begins_those_of_its_episodes_keeps_its_name(aworld: Aworld) -> None:
    run_sync(partial(story, run_event(RunStarted(kind="train")), episode="r.g00001.0.1"))
    assert "run.started" in aworld("log", "r").stdout
    waiting = aworld("log", "r.g").stdout
    assert "episode r.g00001.0.1 · waits for a worker" in waiting
    assert waiting.endswith(" ago, and is the last that is known; --follow waits for more.\n")


def test_the_log_of_a_resumed_run_goes_on_after_its_first_end(aworld: Aworld) -> None:
    story = [
        RunStarted(kind="train"),
        RunFinished(reason="failed"),
        RunTakenOver(node="trainer/r"),
        RunFinished(reason="done"),
    ]

    async def write() -> None:
        async with open_store("sqlite:///.aworld/aworld.db") as store:
            events = [Event.of(data, source="trainer/r", run_id="r") for data in story]
            await store.put_events(run_log("r"), [e.at(n) for n, e in enumerate(events, 1)])

    run_sync(write)
    shown = aworld("log", "r").stdout
    assert [line.split()[0] for line in shown.splitlines()] == ["1", "2", "3", "4"]
    assert aworld("log", "r", "--follow").stdout == shown


async def story(*events: Event, episode: str | None = None) -> None:
    """Archive a run `r`, and perhaps one episode of it that has not ended."""
    async with Runtime(store=STORE, slots=0) as runtime:
        await runtime.bus.append(run_log("r"), 0, events)
        if episode is not None:
            task = Task(id="t", prompt="q")
            asked = EpisodeRequested(task=task, program="mine:dice")
            event = Event.of(asked, source="trainer/r", run_id="r", episode_id=episode)
            await runtime.bus.append(episode_log(episode), 0, [event])


def run_event(data: EventData, *, ago: timedelta = timedelta()) -> Event:
    return Event.of(data, source="trainer/r", run_id="r", time=utc_now() - ago)


def test_the_time_in_a_log_never_runs_back(aworld: Aworld) -> None:
    """Mail is sent before its owner writes it down: here even before the run has begun."""
    sent = run_event(NodeJoined(node="worker/w1", kind="worker"), ago=timedelta(seconds=5))
    begun = run_event(RunStarted(kind="train"), ago=timedelta(seconds=3))
    ended = run_event(RunFinished(reason="done"), ago=timedelta(seconds=1))
    late = run_event(NodeLeft(node="worker/w1"), ago=timedelta(seconds=2))
    run_sync(story, begun, sent, ended, late)
    rows = [line.split()[:2] for line in aworld("log", "r").stdout.splitlines()]
    times = [float(time) for _, time in rows]
    assert [seq for seq, _ in rows] == ["1", "2", "3", "4"]
    assert times == pytest.approx([0, 0, 2, 2], abs=0.1)


def test_a_run_that_goes_on_says_when_it_was_last_heard_of(aworld: Aworld) -> None:
    begun = run_event(RunStarted(kind="train"), ago=timedelta(hours=3))
    joined = run_event(NodeJoined(node="worker/w1", kind="worker"), ago=timedelta(minutes=5))
    run_sync(story, begun, joined)
    assert "state     running, last news 5 min ago" in aworld("status", "r").stdout
    assert re.search(r"^r .* running, last news 5 min ago ", aworld("runs").stdout, re.MULTILINE)
    assert json.loads(aworld("status", "r", "--json").stdout)["last_news"].startswith("20")


def test_status_shows_the_few_metrics_that_say_how_a_run_learns(aworld: Aworld) -> None:
    metrics = {"reward/mean": 0.5, "actor/loss": 0.25, "perf/step_s": 12.5, "batch/rows": 8.0}
    run_sync(
        story,
        run_event(RunStarted(kind="train")),
        run_event(EvaluationFinished(step=0, groups=(), metrics={"reward/mean": 0.125})),
        run_event(StepFinished(step=1, metrics=metrics)),
    )
    shown = aworld("status", "r").stdout
    assert re.search(
        r"^reward/mean +0\.125 +of the held-out episodes, after step 0$", shown, re.MULTILINE
    )
    assert re.search(r"^reward/mean +0\.5 +of the episodes trained on$", shown, re.MULTILINE)
    assert "batch/rows" not in shown
    assert "1 more with --all" in shown
    assert re.search(r"^batch/rows +8$", aworld("status", "r", "--all").stdout, re.MULTILINE)
    told = json.loads(aworld("status", "r", "--json").stdout)
    assert (told["metrics"], told["evaluation"]["step"]) == (metrics, 0)


@pytest.mark.parametrize("ended", [False, True])
def test_an_episode_that_its_run_has_left_was_interrupted(aworld: Aworld, ended: bool) -> None:
    events = [run_event(RunStarted(kind="run"))]
    if ended:
        events.append(run_event(RunFinished(reason="interrupted")))
    run_sync(partial(story, *events, episode="e1"))
    status = "interrupted" if ended else "running"
    assert re.search(rf"^e1 +{status} ", aworld("runs", "--run", "r").stdout, re.MULTILINE)
    assert f"{status} 1" in aworld("status", "r").stdout
    assert ("its run has ended" in aworld("log", "e1").stdout) == ended


def test_replay_shows_the_first_difference_and_exits_with_1(aworld: Aworld) -> None:
    for program in ("mine:swarm", "mine:dice"):
        aworld("run", program, "Add it all")
    changed = aworld("replay", "--all", "--program", "mine:changed_swarm")
    assert changed.returncode == 1
    assert 'word 1: "Check." is now "Verify."' in changed.stdout
    assert '"prompt_sha256":' not in changed.stdout
    both = aworld("replay", "--all")
    assert both.returncode == 1
    assert "identical 1, different 1, unreadable 0, live_calls 0" in both.stdout
    assert "RECORDED" in both.stdout
    assert (
        "\nlikely cause: non-determinism\n  it does something else each time it runs\n"
        in both.stdout
    )
    assert "replayed.py:" in both.stdout
    report = json.loads(aworld("replay", "--run", "last", "--json").stdout)
    assert (report["identical"], report["different"], report["live_calls"]) == (0, 1, 0)
    divergence = report["episodes"][0]["divergence"]
    assert divergence["message"].endswith("differs in data.answer")
    assert (divergence["cause"], divergence["type"]) == ("non-determinism", "episode.finished")


def test_replay_of_an_object_needs_its_name(aworld: Aworld) -> None:
    from tests.replayed import swarm

    swarm.run("Add it all")
    without = aworld("replay")
    assert without.returncode == 2
    assert "needs --program module:attribute" in without.stdout
    assert "unreadable 0, needs --program 1," in without.stdout
    report = json.loads(aworld("replay", "--all", "--json").stdout)
    assert (report["unreadable"], len(report["needs_program"])) == ({}, 1)
    assert aworld("replay", "--program", "mine:swarm").returncode == 0
    unknown = aworld("replay", "nobody")
    assert unknown.returncode == 2
    assert "no episode 'nobody'" in unknown.stderr


def test_fork_goes_on_with_an_edited_answer_and_compares(aworld: Aworld) -> None:
    assert aworld("run", "mine:summing_agent", "Add.").stdout == "13\n"
    (parent,) = json.loads(aworld("runs", "--run", "last", "--json").stdout)["episodes"]
    done = aworld("fork", "--at", "9", "--set", "data.content=100")
    assert done.returncode == 0
    assert re.search(
        r"^before +answered +- +13\nafter +answered +- +110$", done.stdout, re.MULTILINE
    )
    assert "\ndiffering: answer\n" in done.stdout
    fork, diff = re.findall(r"aworld (.*)", done.stdout)
    assert "110" in aworld(*fork.split()).stdout
    assert "= 3 in A, = 100 in B" in aworld(*diff.split()).stdout
    log = aworld("log", "last", "--events").stdout
    assert (
        f"from episode:{parent['id']} after event 9, with another data.content in the next" in log
    )
    both = aworld("replay", "--all")
    assert "identical 2, different 0, unreadable 0, live_calls 0" in both.stdout

    again = aworld("fork", parent["id"][:18], "--at", "9", "--program", "mine:swarm", "--json")
    assert again.returncode == 1
    compared = json.loads(again.stdout)
    assert (compared["parent"], compared["at"]) == (parent["id"], 9)
    assert compared["before"] == {
        "reason": "answered",
        "answer": "13",
        "reward": None,
        "error": None,
    }
    assert compared["after"]["reason"] == "quiescent"
    assert compared["differing"] == ["reason", "answer", "error"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--at", "99"), "has no event 99: it has 1 … 23"),
        (("--at", "23"), "event 23 is the end of episode:"),
        (("--at", "9", "--set", "data.content"), "--set 'data.content': expected --set data.con"),
        (("--at", "9", "--set", "data.text=1"), "tool.returned (seq 10) has no 'data.text'"),
        (("--at", "9", "--model", "adder=nowhere"), "model 'nowhere': give base_url"),
        (("--at", "9", "--model", 'adder={"nodel": 1}'), "--model adder=…: model: Field requ"),
        (
            ("--at", "9", "--model", "other=openai/m"),
            "no role 'other' in mine:summing_agent; there",
        ),
        (("--at", "9", "--arguments", "[1]"), "--arguments '[1]': expected an object"),
        (("--at", "9", "--program", "mine:nothing"), "'mine:nothing'"),
        (("--at", "9", "--slots", "0"), "no other process can run it"),
        (("nobody", "--at", "9"), "no episode 'nobody'"),
    ],
)
def test_a_fork_that_cannot_be_made_is_exit_code_2(
    aworld: Aworld, arguments: tuple[str, ...], message: str
) -> None:
    aworld("run", "mine:summing_agent", "Add.")
    done = aworld("fork", *arguments)
    assert done.returncode == 2
    assert aworld("runs", "--json").stdout.count("\n") == 1
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "command",
    ["log", "debug", "replay", "diff last", "fork --at 5", "export -o x.zip", "otel --episode"],
)
def test_a_log_that_cannot_be_read_is_exit_code_2_and_names_the_event(
    aworld: Aworld, project: Path, command: str
) -> None:
    aworld("run", "mine:dice", "q")
    with closing(sqlite3.connect(project / ".aworld" / "aworld.db")) as database, database:
        database.execute("UPDATE events SET body = x'7b' WHERE seq = 5")
    name, *options = command.split()
    done = aworld(name, *options, "last")
    assert done.returncode == 2
    named = rf"event 5 of episode:[-\w]+ in {STORE} can't be read: not an event: EOF"
    assert re.search(named, done.stdout + done.stderr)


def test_a_failed_episode_is_exit_code_1_and_says_where_to_look(
    aworld: Aworld, project: Path
) -> None:
    (project / "broken.py").write_text("from aworld_runtime import Agent\nagent = Agent()\n")
    done = aworld("run", "broken:agent", "q")
    assert done.returncode == 1
    assert "agent 'agent' has no model" in done.stderr
    assert "see it with: aworld log " in done.stderr


@pytest.mark.slow
def test_a_failure_is_told_once(project: Path) -> None:
    """In a process of its own: here pytest listens to every logger."""
    (project / "broken.py").write_text("from aworld_runtime import Agent\nagent = Agent()\n")
    done = aworld_process("run", "broken:agent", "q", cwd=project)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "agent 'agent' has no model" in done.stderr


@pytest.mark.slow
def test_a_reader_that_leaves_is_no_error(aworld: Aworld, project: Path) -> None:
    aworld("run", "mine:swarm", "Add it all")
    command = f"{sys.executable} -m aworld_runtime.cli log --json | head -n 1"
    done = subprocess.run(
        ["bash", "-c", command], cwd=project, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""


def test_doctor_says_what_to_do(aworld: Aworld) -> None:
    done = aworld("doctor")
    assert done.returncode == 0
    for name in ("python", "extra redis", "extra train", "bus server", "sampler vllm", "store"):
        assert re.search(rf"^(ok|missing) +{name} ", done.stdout, re.MULTILINE)
    found = json.loads(aworld("doctor", "--json").stdout)
    assert all(one["todo"] for one in found if not one["ok"])


def test_side_by_side_cuts_to_where_lines_differ() -> None:
    recorded = "same\n" + "x" * 500 + "old" + "y" * 50
    replayed = "same\n" + "x" * 500 + "new" + "y" * 50
    head, line = side_by_side(recorded, replayed, 83).splitlines()
    assert head.split() == ["RECORDED", "│", "THIS", "TIME"]
    assert "old" in line
    assert "new" in line
    assert max(len(head), len(line)) <= 83


TALKS = """
print("imported")
class Talker:
    role = "talker"
    subscriptions = ("episode.requested",)
    async def handle(self, ctx, event):
        print("handled")
        ctx.emit(MessagePosted(content="x"), to="nobody")
        ctx.emit(EpisodeFinished(answer="said"))
    def program(self):
        return Program(nodes=(self,))
talker = Talker()
"""


def test_what_a_program_prints_is_not_among_json(project: Path) -> None:
    names = "from tests.replayed import EpisodeFinished, MessagePosted, Program"
    (project / "talks.py").write_text(f"{PROJECT}\n{names}\n{TALKS}")
    for command in (
        ("run", "talks:talker", "q", "--json"),
        ("replay", "--json"),
        ("replay", "--program", "talks:talker", "--json"),
        ("fork", "--at", "3", "--json"),
    ):
        done = aworld_process(*command, cwd=project)
        assert done.returncode == 0, done.stderr
        json.loads(done.stdout)
        assert done.stderr.splitlines() == ["imported", "handled"]
    assert aworld_process("run", "talks:talker", "q", cwd=project).stdout.endswith(
        "handled\nsaid\n"
    )


EVIL = "red \x1b[31m, title \x1b]0;x\x07, \x9b31m, \u202e, \x00, 你好"


def test_what_a_model_wrote_is_shown_and_never_obeyed(aworld: Aworld, project: Path) -> None:
    """In a table, in the columns of a difference, and in an error."""
    evil = ["from tests.runtime.test_cli import Evil"]
    evil += [f"{name} = Evil({prompt!r})" for name, prompt in (("one", EVIL), ("two", f"x {EVIL}"))]
    (project / "evil.py").write_text(PROJECT + "\n".join(evil))
    aworld("run", "evil:one", "q")
    shown = [
        aworld("runs", "--run", "last").stdout,
        aworld("replay", "--program", "evil:two").stdout,
        aworld("fork", "--at", "6").stdout,
        aworld("log", EVIL).stderr,
    ]
    for text in shown:
        assert {c for c in text if not c.isprintable()} == {"\n"}
        assert "[31m, title" in text
    assert "red \\x1b[31m, title \\x1b]0;x" in shown[0]
    assert "你好" in shown[0]


class Evil(Agent):
    def __init__(self, prompt: str) -> None:
        super().__init__("evil", llm=ScriptedModel(EVIL, repeat_last=True), system_prompt=prompt)


@pytest.mark.parametrize(
    "how, code, says",
    [
        ("replay --help", 0, r"sqlite:///\u2026 or"),
        ("replay --help >&-", 0, ""),
        ("--help >/dev/full", 1, "aworld: error: no space left on the disk that is"),
    ],
)
def test_an_output_that_is_closed_or_full_or_has_few_letters(
    how: str, code: int, says: str, tmp_path: Path
) -> None:
    environment = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m aworld_runtime.cli {how}"],
        cwd=tmp_path,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert says in done.stdout + done.stderr


def run_of(*log: EventData) -> tuple[RunRecord, list[Event]]:
    events = [Event.of(data, source="trainer/1", run_id="r") for data in log]
    return RunRecord(id="r", kind="train", started=utc_now(), finished=utc_now()), events


def test_counts_notice_what_is_lost_or_counted_twice() -> None:
    task = Task(id="t", prompt="")
    groups = [GroupRequested(group=g, task=task, size=2) for g in "abc"]
    whole = GroupCompleted(group="a", episodes=("1", "2"), rewards=(0, 1))
    double = GroupCompleted(group="b", episodes=("3", "3"), rewards=(0, 1))
    short = GroupCompleted(group="b", episodes=("3",), rewards=(0,))
    start = RunStarted(kind="train")
    good = count(*run_of(start, *groups[:1], whole), episodes=())
    assert str(good) == "requested 2, finished 2, lost 0, counted twice 0"
    bad = count(*run_of(start, *groups, whole, double), episodes=())
    assert (bad.lost, bad.twice, bad.uncounted) == (1, 1, 2)
    assert count(*run_of(start, *groups, whole, short), episodes=()).lost == 1
    again = count(*run_of(start, *groups[:1], whole, whole), episodes=())
    assert (again.lost, again.twice) == (0, 2)


def test_counts_know_a_place_that_was_given_up_from_one_that_is_lost() -> None:
    """A group whose place has used up its attempts goes on smaller."""
    group = GroupRequested(group="a", task=Task(id="t", prompt=""), size=3)
    log = run_of(RunStarted(kind="train"), group, completed("a", "1"))
    tries = [EpisodeRecord(id=f"2.{n}", group_id="a", index=1, status="failed") for n in (1, 2)]
    found = count(*log, episodes=[EpisodeRecord(id="1", group_id="a", status="answered"), *tries])
    assert (found.requested, found.finished, found.given_up, found.lost) == (3, 1, 1, 1)
    assert "given up 1" in str(found)


def completed(group: str, *episodes: str) -> GroupCompleted:
    return GroupCompleted(group=group, episodes=episodes, rewards=(0.0,) * len(episodes))


async def test_what_only_the_store_has_differs(tmp_path: Path) -> None:
    events = [run_event(RunStarted(kind="train")), run_event(RunFinished(reason="done"))]
    async with open_bus("memory://") as bus, open_store(f"sqlite:///{tmp_path}/s.db") as store:
        await bus.append(run_log("r"), 0, events[:1])
        await store.put_events(run_log("r"), [e.at(n) for n, e in enumerate(events, 1)])
        verdict = await judge(bus, store, wait_s=0.0)
        assert (verdict.behind, verdict.differing, verdict.differences[0].seq) == (0, 1, 2)


async def test_what_is_on_its_way_to_the_store_is_behind_and_what_is_lost_differs(
    tmp_path: Path,
) -> None:
    log = run_log("r")
    events = [run_event(RunStarted(kind="train"))]
    events += [run_event(NodeJoined(node=f"worker/{n}", kind="worker")) for n in range(3)]
    async with open_bus("memory://") as bus, open_store(f"sqlite:///{tmp_path}/s.db") as store:

        async def found(wait_s: float = 0.0) -> tuple[int, int]:
            verdict = await judge(bus, store, wait_s=wait_s)
            return verdict.behind, verdict.differing

        await bus.append(log, 0, events)
        kept = await bus.read(log)
        await store.put_events(log, kept[:1])
        assert await found() == (3, 0)
        async with create_task_group() as archiver:
            archiver.start_soon(store.put_events, log, kept)
            assert await found(wait_s=5) == (0, 0)
        await bus.append(log, 4, [run_event(RunFinished(reason="done"))])
        assert await found() == (0, 1)
        async with open_store(f"sqlite:///{tmp_path}/gap.db") as store:  # noqa: PLW2901
            await store.put_events(log, [*kept[:2], kept[3]])
            assert await found() == (0, 2)
        async with open_store(f"sqlite:///{tmp_path}/other.db") as store:  # noqa: PLW2901
            await store.put_events(log, [kept[0], run_event(NodeLeft(node="n")).at(2)])
            assert await found() == (0, 4)


async def test_what_the_store_lacks_of_an_episode_that_outlives_its_run_is_behind(
    tmp_path: Path,
) -> None:
    """Workers go on with the episodes of a run that was interrupted."""
    asked = EpisodeRequested(task=Task(id="t", prompt="q"), program="p:q")
    async with open_bus("memory://") as bus, open_store(f"sqlite:///{tmp_path}/s.db") as store:
        ended = [run_event(RunStarted(kind="run")), run_event(RunFinished(reason="interrupted"))]
        await bus.append(run_log("r"), 0, ended)
        await store.put_events(run_log("r"), await bus.read(run_log("r")))
        await bus.append(episode_log("e"), 0, [run_event(asked)])
        verdict = await judge(bus, store, wait_s=0.0)
        assert (verdict.behind, verdict.differing) == (1, 0)
        await bus.append(episode_log("e"), 1, [run_event(EpisodeFinished(reason="failed"))])
        verdict = await judge(bus, store, wait_s=0.0)
        assert (verdict.behind, verdict.differing) == (0, 2)


# --- with a server -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
async def server_url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    try:
        find_server_binary()
    except ConfigError as error:
        missing("Redis", str(error))
    async with PrivateServer(tmp_path_factory.mktemp("bus")) as server:
        yield server.url


@pytest.fixture
def bus_url(server_url: str) -> str:
    """A bus of the test's own: what a killed worker leaves on it, no other test's worker goes on with."""
    return f"{server_url}?namespace={uuid4().hex}"


worker = partial(serving, "worker", says=" slots, tools: ")


@pytest.mark.slow
async def test_worker_serves_episodes_is_listed_and_drains(project: Path, bus_url: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    bus = ("--bus", bus_url)
    with worker(
        *bus, "--name", "w1", "--tools", "mine:tools", "--health", str(port), cwd=project
    ) as running:
        done = aworld_process("run", "mine:swarm", "Add it all", "--slots", "0", *bus, cwd=project)
        assert (done.returncode, done.stdout) == (0, "checked: 100\n")
        nodes = [
            json.loads(x)
            for x in aworld_process("nodes", *bus, "--json", cwd=project).stdout.splitlines()
        ]
        assert {("worker", "worker/w1"), ("tool", "add/w1")} <= {
            (n["kind"], n["name"]) for n in nodes
        }
        assert "worker/w1" in aworld_process("nodes", *bus, cwd=project).stdout
        health = json.loads(await to_thread.run_sync(get_text, f"http://127.0.0.1:{port}/healthz"))
        assert (health["status"], health["worker"]) == ("ok", "w1")
        metrics = await to_thread.run_sync(get_text, f"http://127.0.0.1:{port}/metrics")
        assert 'aworld_episodes_finished_total{reason="answered"} 1.0' in metrics.splitlines()
        nowhere = aworld_process("verify", "--log", "nope", *bus, cwd=project)
        assert nowhere.returncode == 2
        assert "no log begins with 'nope'" in nowhere.stderr
        verified = aworld_process("verify", *bus, cwd=project)
        assert (verified.returncode, " 0 differ" in verified.stdout) == (0, True), (
            verified.stdout + verified.stderr
        )
        running.send_signal(signal.SIGTERM)
        assert running.wait(10) == 0
    assert "nobody is on the bus" in aworld_process("nodes", *bus, cwd=project).stdout


@pytest.mark.slow
async def test_a_worker_whose_name_is_taken_says_so_and_both_are_listed(
    project: Path, bus_url: str
) -> None:
    async with open_bus(bus_url) as bus:
        await bus.announce(NodeInfo(name="worker/w9", kind="worker", host="h", pid=7), ttl_s=30)
        with worker("--bus", bus_url, "--name", "w9", cwd=project) as running:

            async def both_listed() -> bool:
                names = {(node.name, node.pid) for node in await bus.nodes()}
                return names == {("worker/w9", 7), ("worker/w9", running.pid)}

            await wait_until(both_listed, 10, "both of that name")
            told = (project / "worker.log").read_text()
    assert "worker/w9 is on the bus already (host h, pid 7)" in told


@pytest.mark.slow
async def test_second_signal_ends_a_worker_at_once(project: Path, bus_url: str) -> None:
    (project / "slow.py").write_text(
        "from aworld_runtime import Agent\n"
        "from aworld_runtime.models.scripted import ScriptedModel\n"
        "agent = Agent(llm=ScriptedModel('late', delay_s=60))\n"
    )
    with worker("--bus", bus_url, "--name", "w2", cwd=project) as running:
        async with Runtime(bus=bus_url, store=f"sqlite:///{project}/s.db", slots=0) as runtime:
            await runtime.submit("slow:agent", "q")
            await wait_until(
                lambda: is_busy(runtime, "worker/w2"), 10, "the worker runs the episode"
            )
            running.send_signal(signal.SIGINT)
            log = project / "worker.log"
            await wait_until(lambda: "draining 1 in hand" in log.read_text(), 10, "it drains")
            assert running.poll() is None
            running.send_signal(signal.SIGINT)
            assert running.wait(10) == 130
            assert "Traceback" not in log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("times, code", [(1, 0), (2, 130)])
async def test_a_worker_of_tools_ends_its_calls_at_a_signal_and_leaves_at_the_second(
    project: Path, bus_url: str, times: int, code: int
) -> None:
    (project / "late.py").write_text(
        "from pathlib import Path\n"
        "import anyio\n"
        "async def late() -> str:\n"
        "    Path('called').touch()\n"
        "    while not Path('go').exists():\n"
        "        await anyio.sleep(0.02)\n"
        "    return 'done'\n"
    )
    call = ToolCalled(call=ToolCall(id="c", name="late"))
    called = Event.of(call, source="solver/1", episode_id="e", trust="model")
    arguments = ("--slots", "0", "--tools", "late:late", "--bus", bus_url)
    async with open_bus(bus_url) as bus, bus.mailbox(episode_log("e")) as mail:
        with worker(*arguments, cwd=project) as running:
            await bus.put(tool_queue("late"), called)
            await wait_until((project / "called").exists, 10, "the tool is called")
            running.send_signal(signal.SIGTERM)
            log = project / "worker.log"
            await wait_until(lambda: "draining 1 in hand" in log.read_text(), 10, "it drains")
            await bus.put(tool_queue("late"), called.model_copy(update={"id": "later"}))
            if times == 2:
                running.send_signal(signal.SIGTERM)
            else:
                (project / "go").touch()
                (answer,) = await anext(mail)
                assert answer.event.data == ToolReturned(name="late", content="done")
            assert await to_thread.run_sync(running.wait, 10) == code
        assert "Traceback" not in log.read_text()
        assert await bus.backlog(tool_queue("late")) == times


@pytest.mark.slow
async def test_a_worker_whose_bus_stays_away_ends_with_1(project: Path, tmp_path: Path) -> None:
    async with PrivateServer(tmp_path / "bus") as server:
        with worker("--bus", f"{server.url}?outage_s=0.5", cwd=project) as running:
            await server.stop()
            assert await to_thread.run_sync(running.wait, 15) == 1
    told = (project / "worker.log").read_text()
    assert "aworld: error: " in told
    assert "has not answered for 0.5 s" in told
    assert "Traceback" not in told


async def is_busy(runtime: Runtime, name: str) -> bool:
    return any(node.name == name and node.load > 0 for node in await runtime.bus.nodes())


async def test_episodes_are_paused_resumed_and_cancelled_by_hand(
    aworld: Aworld, project: Path, bus_url: str
) -> None:
    (project / "slow.py").write_text(
        "from aworld_runtime import Agent\n"
        "from aworld_runtime.models.scripted import ScriptedModel\n"
        "agent = Agent(llm=ScriptedModel('late', delay_s=60, repeat_last=True))\n"
    )
    bus, store = bus_url, f"sqlite:///{project}/s.db"

    async def call(*arguments: str) -> Done:
        return await to_thread.run_sync(aworld, *arguments, "--bus", bus, "--store", store)

    async with Runtime(bus=bus, store=store) as runtime:
        one, other = [await runtime.submit("slow:agent", "q") for _ in range(2)]

        async def both_run() -> bool:
            return len(await runtime.store.episodes(run_id=runtime.run_id)) == 2

        await wait_until(both_run, 10, "both episodes are in the store")
        paused = await call("pause", runtime.run_id, "--reason", "a look")
        assert paused.returncode == 0
        assert sorted(paused.stdout.splitlines()) == sorted([f"{one}  paused", f"{other}  paused"])
        assert (await call("resume", one[:-1])).stdout == f"{one}  resumed\n"
        cancelled = await call("cancel", one, "--json")
        assert json.loads(cancelled.stdout) == {"episode": one, "outcome": "cancelled"}
        assert (await runtime.result(one)).error == "cancelled by hand"
        again = await call("cancel", one)
        assert (again.returncode, again.stderr) == (
            2,
            f"aworld: error: episode {one} has finished (cancelled)\n",
        )
        assert (await call("cancel", runtime.run_id)).stdout == f"{other}  cancelled\n"
        assert (await runtime.result(other)).reason == "cancelled"
        nobody = await call("pause", "nope")
        assert (nobody.returncode, "no episode 'nope'" in nobody.stderr) == (2, True)


async def test_a_question_is_listed_and_answered_by_hand(
    aworld: Aworld, project: Path, bus_url: str
) -> None:
    (project / "asking.py").write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from tests.runtime.test_questions import Careful\nagent = Careful('May I?')\n"
    )
    bus, store = bus_url, f"sqlite:///{project}/s.db"

    async def call(*arguments: str) -> Done:
        return await to_thread.run_sync(
            aworld, "answer", *arguments, "--bus", bus, "--store", store
        )

    async with Runtime(bus=bus, store=store) as runtime:
        episode = await runtime.submit("asking:agent", "q")
        await asked(runtime, episode, 1)
        listed = (await call(episode)).stdout.splitlines()
        assert listed[0].split() == ["SEQ", "ROLE", "QUESTION"]
        seq, role, question = listed[1].split(maxsplit=2)
        assert (role, question) == ("careful", "May I?")
        (told,) = json.loads((await call(episode, "--json")).stdout)
        assert told == {"seq": int(seq), "role": role, "question": question}
        wrong = await call(episode, "yes", "--question", "1")
        assert (wrong.returncode, "no open question at event 1" in wrong.stderr) == (2, True)
        assert (await call(episode, "You may.")).stdout == f"{episode}  answered\n"
        assert (await runtime.result(episode)).answer == "heard: You may."


async def test_nodes_are_listed_with_load_lag_and_age(aworld: Aworld, bus_url: str) -> None:
    async with open_bus(bus_url) as bus:
        since = bus.now() - timedelta(minutes=5)
        queues = ("episodes", "more")
        worker = NodeInfo(name="worker/w1", kind="worker", load=0.5, queues=queues, since=since)
        await bus.announce(worker, ttl_s=30)
        await bus.announce(NodeInfo(name="archiver/a", kind="archiver", behind_s=1.52), ttl_s=30)
        for queue, number in (("episodes", 2), ("more", 1)):
            await bus.put(
                queue, *(run_event(NodeJoined(node="n", kind="k")) for _ in range(number))
            )
        listed = await to_thread.run_sync(aworld, "nodes", "--bus", bus_url)
        rows = [re.split(r"  +", line)[:5] for line in listed.stdout.splitlines()]
        assert rows == [
            ["NODE", "KIND", "LOAD", "LAG", "AGE"],
            ["archiver/a", "archiver", "0%", "1.5 s", "-"],
            ["worker/w1", "worker", "50%", "3", "5 min"],
        ]
        found = await to_thread.run_sync(aworld, "nodes", "--bus", bus_url, "--json")
        fields = [json.loads(line) for line in found.stdout.splitlines()]
        assert [(f["role"], f["lag"]) for f in fields] == [("archiver", None), ("worker", 3)]


async def test_dead_letters_are_listed_shown_requeued_and_dropped(
    aworld: Aworld, server_url: str
) -> None:
    url = f"{server_url}?namespace=dead"

    async def call(action: str, *arguments: str) -> Done:
        command = ("dead-letter", action, *arguments, "--bus", url)
        return await to_thread.run_sync(aworld, *command)

    def note(text: str, **metadata: Any) -> Event:
        return Event.of(MessagePosted(content=text), source="test/1", **metadata)

    assert (await call("list")).stdout == "no dead letters\n"
    async with open_bus(url) as bus, Redis.from_url(server_url) as admin:
        await admin.xadd(Keys("dead").queue("work").work, {BODY: b"\x1b[2J no event"})
        late = note("late", deadline=bus.now() - timedelta(seconds=1))
        await bus.put("work", note("\x1b[31mred\u202e"), late)
        async with bus.consume("work", consumer="c") as consumer:
            await (await consumer.take()).dead_letter("handler failed:\x1b[2J\nno")

            async def all_dead() -> bool:
                return len(await bus.dead_letters("work")) == 3

            async with create_task_group() as tasks:
                tasks.start_soon(consumer.take)
                await wait_until(all_dead, description="three dead letters")
                tasks.cancel_scope.cancel()
        listed = (await call("list")).stdout
        assert "handler failed:\\x1b[2J no" in listed
        assert "has passed" in listed
        letters = [
            json.loads(x) for x in (await call("list", "work", "--json")).stdout.splitlines()
        ]
        by_type = {x["event"] and x["event"]["data"]["content"]: x["id"] for x in letters}
        raw = next(base64.b64decode(x["raw_base64"]) for x in letters if x["event"] is None)
        assert raw == b"\x1b[2J no event"
        shown = (await call("show", "work", "--all")).stdout
        assert "\x1b" not in listed + shown
        assert "\u202e" not in shown
        assert "b'\\x1b[2J no event'" in shown
        requeued = await call("requeue", "work", "--all")
        assert requeued.returncode == 1
        assert "left: its deadline" in requeued.stdout
        assert requeued.stdout.count("requeued") == 2
        assert await bus.backlog("work") == 2
        dropped = await call("drop", "work", by_type["late"], "--json")
        assert json.loads(dropped.stdout)["outcome"] == "dropped"
        for wrong, said in [
            (("drop", "work"), "give IDs, or --all"),
            (("show", "work", "1-1"), "no dead letter '1-1'"),
        ]:
            refused = await call(*wrong)
            assert (refused.returncode, said in refused.stderr) == (2, True)


async def test_an_episode_without_an_owner_hears_later_that_it_is_cancelled(
    aworld: Aworld, bus_url: str
) -> None:
    async with open_bus(bus_url) as bus:
        asked = EpisodeRequested(task=Task(id="t", prompt="q"), program="mine:dice")
        await bus.append(
            episode_log("alone"), 0, [Event.of(asked, source="runtime/r", episode_id="alone")]
        )
        told = await to_thread.run_sync(
            aworld, "cancel", "alone", "--bus", bus_url, "--wait", "0.1"
        )
        assert (told.returncode, told.stdout) == (1, "alone  not cancelled yet\n")
        async with bus.mailbox(episode_log("alone")) as box:
            (mail,) = await anext(box)
        assert mail.event.data == EpisodeCancelled(reason="cancelled by hand")
        await bus.unlink(episode_log("alone"))


@pytest.mark.slow
async def test_worker_of_other_code_is_refused(project: Path, bus_url: str) -> None:
    async with open_bus(bus_url) as bus:
        await bus.announce(
            NodeInfo(name="trainer/r1", kind="trainer", version="0.0.1+other"), ttl_s=30
        )
        done = aworld_process("worker", "--bus", bus_url, cwd=project)
        await bus.withdraw("trainer/r1")
    assert done.returncode == 2
    assert "trainer/r1 on this bus runs code version 0.0.1+other" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("anyio_backend")  # of bus_url
def test_who_is_interrupted_is_told_that_workers_go_on(
    aworld: Aworld, project: Path, bus_url: str
) -> None:
    command = [sys.executable, "-m", "aworld_runtime.cli", "run", "mine:dice", "q"]
    with subprocess.Popen(
        [*command, "--slots", "0", "--bus", bus_url], cwd=project, stderr=subprocess.PIPE, text=True
    ) as process:
        wait_until_sync(lambda: "running" in aworld("runs").stdout, 10, "the run has begun")
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=15)
    assert process.returncode == 130
    assert stderr.endswith(f"To end it: aworld cancel last --bus {bus_url}\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, in_background",
    [(signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGTERM, True)],
)
def test_ctrl_c_is_130_without_a_traceback(
    aworld: Aworld, project: Path, number: signal.Signals, in_background: bool
) -> None:
    """SIGTERM is the same, also in the background of a script, where the shell has SIGINT ignored."""
    (project / "slow.py").write_text(
        "from aworld_runtime import Agent\n"
        "from aworld_runtime.models.scripted import ScriptedModel\n"
        "print('loaded', flush=True)\n"
        "agent = Agent(llm=ScriptedModel('late', delay_s=60))\n"
    )
    command = [sys.executable, "-m", "aworld_runtime.cli", "run", "slow:agent", "q"]
    if in_background:
        command = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *command]
    with subprocess.Popen(
        command, cwd=project, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loaded\n"
        wait_until_sync(lambda: "running" in aworld("runs").stdout, 10, "the run has begun")
        process.send_signal(number)
        _, stderr = process.communicate(timeout=15)
    assert (process.returncode, stderr) == (130, "")
    assert "interrupted" in aworld("runs").stdout
