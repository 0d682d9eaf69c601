"""`aworld log --follow`: a process at a terminal, beside a run that goes on."""

from __future__ import annotations

import codecs
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import anyio
import pytest
from anyio.to_thread import run_sync

from aworld_runtime import Agent
from aworld_runtime.bus.open import open_bus
from aworld_runtime.bus.server import PrivateServer
from aworld_runtime.events import EpisodeClaimed, EpisodePaused, EpisodeResumed, Event, EventData
from aworld_runtime.messages import ToolCall
from aworld_runtime.models.base import ModelRequest
from aworld_runtime.models.scripted import Reply, ScriptedModel
from aworld_runtime.names import episode_log
from aworld_runtime.runtime import Runtime
from aworld_runtime.store.open import open_store
from tests.episodes import Adder, Gate
from tests.handmade import EPISODE, Log
from tests.terminal import Terminal
from tests.waiting import wait_until

pytestmark = pytest.mark.anyio


def through_the_gate(request: ModelRequest) -> Reply:
    """Add and knock at once; answer with what comes back."""
    results = [m.content for m in request.messages if m.role == "tool"]
    calls = [
        ToolCall(id="1", name="add", arguments={"a": 1, "b": 2}),
        ToolCall(id="2", name="gate"),
    ]
    return ", ".join(results) if results else calls


class AtTerminal:
    """`aworld log EPISODE --follow`, and what its terminal shows."""

    def __init__(self, process: subprocess.Popen[bytes], end: int) -> None:
        self.process = process
        self.terminal = Terminal(height=20)
        self.written = ""
        self._end = end
        self._decode = codecs.getincrementaldecoder("utf-8")().decode

    def look(self) -> str:
        """What it shows now."""
        try:
            while text := self._decode(os.read(self._end, 2**16)):
                self.written += text
                self.terminal.feed(text)
        except BlockingIOError:
            pass
        except OSError:  # the process has ended, and its terminal with it
            pass
        return str(self.terminal)


@contextmanager
def at_terminal(*arguments: str, **environment: str) -> Generator[AtTerminal]:
    ours, its = os.openpty()
    os.set_blocking(ours, False)
    usual = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    size = {"COLUMNS": "100", "LINES": "20", "TERM": "xterm"}
    process = subprocess.Popen(
        [sys.executable, "-m", "aworld_runtime.cli", "log", *arguments, "--follow"],
        stdout=its,
        stderr=its,
        env=usual | size | environment,
    )
    os.close(its)
    try:
        yield AtTerminal(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@asynccontextmanager
async def knocking(store: str, *, model_s: float = 0) -> AsyncGenerator[tuple[str, Gate, Runtime]]:
    """An episode that stands before a gate."""
    gate = Gate()
    model = ScriptedModel(through_the_gate, delay_s=model_s)
    agent = Agent("porter", llm=model, tools=[Adder(), gate])
    async with Runtime(store=store) as runtime, anyio.create_task_group() as tasks:
        episode = await runtime.submit(agent, "Let me in.")
        tasks.start_soon(runtime.result, episode)
        await gate.reached.wait()
        yield episode, gate, runtime


async def test_a_run_is_shown_as_it_goes_on_and_ends(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/aworld.db"
    async with knocking(store) as (episode, gate, runtime):

        async def send(data: EventData) -> None:
            await runtime.bus.send_mail(episode_log(episode), Event.of(data, source="user/1"))

        where = episode, "--store", store
        with at_terminal(*where) as shown, at_terminal(*where, NO_COLOR="1") as plain:
            await wait_until(has(shown, "add(a=1, b=2)", "│  └─ gate()", "running …"), 20)
            await wait_until(has(plain, "add(a=1, b=2)", "│  └─ gate()", "running …"), 20)
            assert not shown.terminal.shows_cursor
            before = shown.look()
            await wait_until(lambda: shown.look() != before, 5, "the clock goes on")
            await send(EpisodePaused(reason="tea"))
            await wait_until(has(shown, "└─ paused: tea", " · paused for "))
            await send(EpisodeResumed())
            gate.open.set()
            for one in (shown, plain):
                assert await run_sync(one.process.wait, 10) == 0
                lines = one.look().splitlines()
                assert [line[16:36].rstrip() for line in lines[2:6]] == [
                    "├─ turn 1  scripted",
                    "│  ├─ add(a=1, b=2)",
                    "│  ├─ gate()",
                    "│  ├─ paused: tea",
                ]
                assert lines[-1][16:].startswith("answered '3, open' · ")
                assert one.terminal.shows_cursor
            assert "\x1b[36m" in shown.written
            assert "\x1b[36m" not in plain.written


def has(shown: AtTerminal, *texts: str) -> Callable[[], bool]:
    return lambda: all(text in shown.look() for text in texts)


async def test_ctrl_c_leaves_what_is_shown_and_a_cursor(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/aworld.db"
    async with knocking(store) as (episode, gate, _):
        with at_terminal(episode, "--store", store) as shown:
            await wait_until(has(shown, "running …"), 20)
            shown.process.send_signal(signal.SIGINT)
            assert await run_sync(shown.process.wait, 10) == 130
            assert "gate()" in shown.look()
            assert shown.terminal.shows_cursor
            assert "Traceback" not in shown.written
        gate.open.set()


async def test_a_pipe_gets_what_is_settled_once_it_is(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/aworld.db"
    async with knocking(store) as (episode, gate, _):
        command = [sys.executable, "-m", "aworld_runtime.cli", "log", episode, "--store", store]
        process = await anyio.open_process([*command, "--follow"])
        assert process.stdout is not None
        first = (await process.stdout.receive()).decode()
        assert first.splitlines()[0][16:].startswith(f"episode {episode} · ")
        assert "gate" not in first
        gate.open.set()
        rest = "".join([part.decode() async for part in process.stdout])
        await process.wait()
    afterwards = await anyio.run_process(command)
    assert first + rest == afterwards.stdout.decode()
    assert "\x1b" not in first + rest


async def test_a_reader_that_leaves_while_a_run_is_followed_is_no_error(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/aworld.db"
    async with knocking(store, model_s=0.5) as (episode, gate, _):
        log = f"{sys.executable} -m aworld_runtime.cli log {episode} --store {store} --follow"
        script = f"{log} | head -n 1; echo ${{PIPESTATUS[0]}}"
        process = await anyio.open_process(["bash", "-c", script])
        assert process.stdout is not None
        assert process.stderr is not None
        assert episode.encode() in await process.stdout.receive()
        gate.open.set()
        assert [part async for part in process.stdout] == [b"141\n"]
        assert [part async for part in process.stderr] == []


async def test_a_log_on_a_bus_is_followed_there(tmp_path: Path) -> None:
    log, name = Log(), episode_log(EPISODE)
    log.add("worker", EpisodeClaimed(worker="w1"), log.requested)
    store = f"sqlite:///{tmp_path}/aworld.db"
    async with (
        PrivateServer(tmp_path / "bus") as server,
        open_bus(server.url) as bus,
        open_store(store),
    ):
        await bus.append(name, 0, log.events)
        command = [sys.executable, "-m", "aworld_runtime.cli", "log", EPISODE, "--follow"]
        process = await anyio.open_process([*command, "--bus", server.url, "--store", store])
        assert process.stdout is not None
        assert b"worker w1" in await process.stdout.receive()
        await bus.append(name, 2, log.finished()[2:])
        (last,) = [part async for part in process.stdout]
        assert last.decode()[16:].startswith("answered · ")
        assert await process.wait() == 0
