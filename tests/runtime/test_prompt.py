"""`aworld debug`: its prompt, as a script drives it and as a person does."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from aworld_runtime import Runtime, cli
from aworld_runtime.bus.base import read_all
from aworld_runtime.events import EpisodeResumed
from aworld_runtime.names import episode_log
from aworld_runtime.runtime import run_sync
from aworld_runtime.store.open import open_store
from tests.waiting import wait_until_sync

Debug = Callable[..., tuple[int, str, str]]
PROJECT = Path(__file__).parents[2]


@pytest.fixture
def debug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Debug:
    """Runs a command over the lines of a script, in a folder where one episode of a team has run."""
    monkeypatch.chdir(tmp_path)
    for name in ("AWORLD_BUS", "AWORLD_STORE"):
        monkeypatch.delenv(name, raising=False)
    run_sync(record)

    def call(*script: str, command: tuple[str, ...] = ("debug", "last")) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in script)))
        capsys.readouterr()
        code = cli.main(command)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


async def record() -> None:
    async with Runtime() as runtime:
        episode = await runtime.run("tests.replayed:swarm", "Add it all.")
        assert episode.reason == "answered"


def test_a_script_stops_at_a_breakpoint_and_prints_what_is_there(debug: Debug) -> None:
    code, out, err = debug(
        "break type=tool.called and data.b=40", "c", "p data.call.arguments", "q"
    )
    assert (code, err) == (0, "")
    head, first, set_, stopped, there, *printed = out.splitlines()
    assert head.endswith("its handlers run again as you pass them")
    assert first.startswith("→    1")
    assert set_ == "breakpoint 1: type=tool.called and data.b=40"
    assert stopped == "breakpoint 1: type=tool.called and data.b=40"
    assert "add(a=30, b=40)" in there
    assert "".join(printed).replace(" ", "") == '{"a":30,"b":40}'


def test_moving_and_looking(debug: Debug) -> None:
    code, out, _ = debug(
        "until role=verifier and model.requested", "", "back", "g 1", "w", "n", "l"
    )
    assert code == 0
    assert "nothing follows" in out
    assert "solver       waits" in out
    assert [line[0] for line in out.splitlines()[-10:]] == [*"    →     "]


def test_the_conversation_of_an_agent_as_it_was_at_an_event(debug: Debug) -> None:
    code, out, _ = debug("u tool.returned", "state solver", "state")
    assert code == 0
    lines = out.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("solver at event"))
    assert lines[begin + 1 : begin + 3] == ["  system: Add.", "  user: Add it all."]
    assert "+ tool: 30" in lines
    assert out.count("solver at event") == 2


def test_at_the_request_the_state_is_the_episodes(debug: Debug) -> None:
    code, out, err = debug("state")
    assert (code, err) == (0, "")
    assert "\nrunning\n" in out
    assert "  swarm        has to handle event 1\n" in out


@pytest.mark.parametrize(
    "line, told",
    [
        ("fly", "no command is called 'fly': step, next,"),
        ("st", "several commands begin with 'st': step, state"),
        ("break type=", "at character 6: expected a value"),
        ("goto 900", "no event 900"),
        ("goto there", "SEQ is a number, not 'there'"),
        ("until", "SEQ or PREDICATE is missing"),
        ("clear 7", "no breakpoint 7"),
        ("print data.nothing", "episode.requested has no data.nothing"),
        ("state judge", "no role 'judge'"),
        ("pause", "the episode has ended"),
        ("edit data.content=1", "the request itself can't be edited"),
    ],
)
def test_a_command_that_fails_ends_a_script_with_2(debug: Debug, line: str, told: str) -> None:
    code, out, err = debug(line, "step")
    assert code == 2
    assert err.startswith("aworld: error: ")
    assert told in err
    assert len(out.splitlines()) == 2


def test_what_is_edited_goes_on_live_in_a_fork(debug: Debug) -> None:
    code, out, err = debug(
        "u type=tool.returned and content=30", "edit data.content=31", "w", "n", "c"
    )
    assert (code, err) == (0, "")
    assert re.search(r"^episode \S+: live, paused\n→ .* → solver: add = 31$", out, re.MULTILINE)
    assert "paused, 0 steps left\n  solver       has to handle event " in out
    assert "answered 'checked: 100'" in out.splitlines()[-1]
    code, out, _ = debug("u type=answer.proposed and role=solver", "p data.text")
    assert (code, out.splitlines()[-1]) == (0, "101")


def test_from_any_event_a_fork_goes_on_with_another_program(debug: Debug) -> None:
    script = ("u type=message.posted and to=verifier", "run tests.replayed:swarm")
    code, out, err = debug(*script)
    assert (code, err) == (0, "")
    assert "answered 'checked: 100'" in out.splitlines()[-1]


def test_a_difference_is_shown_side_by_side_and_is_1(debug: Debug) -> None:
    program = ("--program", "tests.replayed:changed_swarm")
    code, out, _ = debug("c", "c", command=("debug", "last", *program))
    assert code == 1
    assert "DIFFERENT: at seq" in out
    assert "│" in out
    assert out.splitlines()[-2] == "nothing follows"


STOPS = """
import os
from aworld_runtime.events import EpisodeFinished
from aworld_runtime.nodes.node import Program

class Stops:
    role = "stops"
    subscriptions = ("episode.requested",)

    async def handle(self, ctx, event):
        answer = "yes"
        if "STOP" in os.environ:
            breakpoint()
        ctx.emit(EpisodeFinished(answer=answer))

    def program(self):
        return Program(nodes=(self,))

program = Stops()
"""


def test_a_breakpoint_in_the_users_code_stops_there(
    debug: Debug, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stops.py").write_text(STOPS)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert debug(command=("run", "stops:program", "q")) == (0, "yes\n", "")
    done = subprocess.run(  # pytest has a pdb of its own
        [sys.executable, "-m", "aworld_runtime.cli", "debug", "last"],
        input="continue\np answer\nanswer = 'no'\ncontinue\nprint type\nquit\n",
        env=os.environ | {"STOP": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert "(Pdb) 'yes'" in done.stdout
    assert "differs in data.answer" in done.stdout
    assert done.stdout.count("(Pdb)") == 3
    assert done.stdout.splitlines()[-1] == "delivery.handled"


def test_breakpoints_may_be_given_with_the_command(debug: Debug) -> None:
    command = ("debug", "last", "--break", "tool.called", "--break", "role=verifier")
    code, out, _ = debug("breaks", "c", command=command)
    assert code == 0
    assert "  2  role=verifier" in out
    assert "breakpoint 1: type=tool.called" in out
    code, _, err = debug("c", command=("debug", "last", "--break", "nonsense"))
    assert (code, "at character 9" in err) == (2, True)


def test_every_command_is_in_the_help(debug: Debug) -> None:
    _, out, _ = debug("help", "help b")
    assert "  b  break PREDICATE " in out
    assert out.count("  b  break PREDICATE ") == 2
    assert out.count("  q  quit") == 1


def test_replay_stops_at_a_breakpoint_and_opens_the_prompt(debug: Debug) -> None:
    command = ("replay", "last", "--break", "type=tool.called and data.name=add")
    code, out, _ = debug("p data.call.id", command=command)
    assert code == 0
    assert out.splitlines()[1] == "breakpoint 1: type=tool.called and data.name=add"
    assert out.splitlines()[-1] == "c1"
    for wrong, told in (("--all", "one episode"), ("--json", "choose one")):
        code, _, err = debug(command=("replay", wrong, "--break", "tool.called"))
        assert (code, told in err) == (2, True)


def test_a_new_episode_runs_in_the_debugger(debug: Debug) -> None:
    command = ("run", "tests.replayed:swarm", "Add it all.", "--break", "model.completed")
    code, out, err = debug("c", "w", "s", "clear", "c", command=command)
    assert (code, err) == (0, "")
    assert "breakpoint 1: type=model.completed" in out
    assert "paused, 0 steps left" in out
    assert "answered 'checked: 100'" in out.splitlines()[-1]


def test_a_new_episode_that_is_left_paused_ends_with_its_worker(debug: Debug) -> None:
    command = ("run", "tests.replayed:swarm", "Add it all.", "--break", "model.completed")
    _, out, _ = debug("c", "q", command=command)
    assert out.splitlines()[-1] == "it was left paused, and is cancelled"
    for left_again in ("fork", "q"):
        _, out, _ = debug(left_again)
        assert out.split(", ")[1] == "cancelled"
        assert ("\nit was left paused, and is cancelled\n" in out) == (left_again == "fork")


SLOW = """
from aworld_runtime import Agent
from aworld_runtime.models.scripted import ScriptedModel
agent = Agent(llm=ScriptedModel("late", delay_s=60, repeat_last=True))
"""


async def resumptions(folder: Path) -> int:
    async with open_store(f"sqlite:///{folder}/.aworld/aworld.db") as store:
        (episode,) = await store.episodes(limit=1)
        events = await read_all(store, episode_log(episode.id))
    return sum(isinstance(event.data, EpisodeResumed) for event in events)


def test_at_a_terminal_ctrl_c_interrupts_a_command_and_not_the_session(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    person, terminal = pty.openpty()
    os.set_blocking(person, False)
    command = [sys.executable, "-m", "aworld_runtime.cli", "run", "slow:agent", "q", "--debug"]
    process = subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, cwd=tmp_path
    )
    os.close(terminal)
    screen = ""

    def see(text: str) -> None:
        def is_there() -> bool:
            nonlocal screen
            with suppress(BlockingIOError):
                screen += os.read(person, 4096).decode(errors="replace")
            return text in screen

        nonlocal screen
        wait_until_sync(is_there, 15, f"{text!r} on the screen")
        screen = screen.partition(text)[2]

    try:
        for line, answer in [
            ("nex\t", "delivery.handled"),
            ("fly", "no command is called 'fly'"),
            ("until model.requested", "model.requested  "),
            ("continue", "continue"),
        ]:
            see("(aworld) ")
            os.write(person, f"{line}\n".encode())
            see(answer)
        for _ in range(
            2
        ):  # the command that waits for the model, then the line that is being written
            process.send_signal(signal.SIGINT)
            see("interrupted")
        see("(aworld) ")
        os.write(person, b"print type\n")
        see("episode.resumed")
        see("(aworld) ")
        os.write(person, b"\x04")
        assert process.wait(15) == 0
    finally:
        process.kill()
        process.wait()
        os.close(person)
