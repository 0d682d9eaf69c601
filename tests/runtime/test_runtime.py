"""The runtime, end to end: bus, worker, archiver and store together."""

import asyncio
import gc
import logging
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import anyio
import pytest

from aworld_runtime import Agent, LLMClient, Runners, Runtime
from aworld_runtime.archive.verify import compare
from aworld_runtime.bus.base import NodeInfo, read_all
from aworld_runtime.errors import AWorldError, ConfigError, NotFoundError, UsageError
from aworld_runtime.events import (
    AnswerProposed,
    EpisodeFinished,
    EpisodeRequested,
    Event,
    MessagePosted,
)
from aworld_runtime.messages import Task, ToolCall
from aworld_runtime.models.base import ModelRequest
from aworld_runtime.models.scripted import Reply, ScriptedModel
from aworld_runtime.names import EPISODES_QUEUE, episode_log, run_log
from aworld_runtime.nodes.context import Context
from aworld_runtime.nodes.node import Program
from aworld_runtime.nodes.worker import Worker
from aworld_runtime.runtime import run_sync
from aworld_runtime.store.open import open_store
from tests.engine import Answer, engine
from tests.episodes import EXACT_MATCH, Adder, adding, adding_swarm, of_kind
from tests.replayed import swarm
from tests.waiting import wait_until


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/store.db"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, for what uses the default store."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def echo(request: ModelRequest) -> Reply:
    return f"echo {request.messages[-1].content}"


async def test_an_episode_runs_and_everything_is_archived(store: str) -> None:
    task = Task(id="t1", prompt="Add.", data={"expected": "checked: 100"}, environment=EXACT_MATCH)
    async with Runtime(bus="memory://", store=store) as runtime:
        episode = await runtime.run(adding_swarm(ScriptedModel(adding), Adder()), task)
        on_bus = await read_all(runtime.bus, episode_log(episode.id))
    assert (episode.answer, episode.reason, episode.reward) == ("checked: 100", "answered", 1.0)
    async with open_store(store) as opened:
        assert await opened.read(episode_log(episode.id)) == on_bus
        (record,) = await opened.episodes(run_id=runtime.run_id)
        assert (record.status, record.reward, record.turns) == ("answered", 1.0, 4)
        (run,) = await opened.runs()
        assert (run.id, run.kind, run.reason) == (runtime.run_id, "run", "done")


async def test_bus_and_store_hold_the_same(store: str) -> None:
    async with Runtime(bus="memory://", store=store) as runtime:
        await runtime.run(swarm, "Add.")
        await wait_until(lambda: same(runtime), description="the archive has caught up")


async def same(runtime: Runtime) -> bool:
    return (await compare(runtime.bus, runtime.store)).same


class Numbering(Agent):
    """Answers with a number of its own."""

    async def handle(self, ctx: Context, event: Event) -> None:
        if isinstance(event.data, MessagePosted):
            ctx.emit(AnswerProposed(text=ctx.uuid()))


async def test_episodes_draw_alike_only_where_they_are_given_one_seed(store: str) -> None:
    async with Runtime(bus="memory://", store=store) as runtime:
        seeds = (None, None, 7, 7)
        ids = [await runtime.submit(Numbering("clerk"), "Number it.", seed=s) for s in seeds]
        one, other, seventh, again = [(await runtime.result(each)).answer for each in ids]
    assert len({one, other, seventh}) == 3
    assert seventh == again


async def test_many_episodes_at_once_each_with_its_own_answer(store: str) -> None:
    agent = Agent(llm=ScriptedModel(echo, delay_s=0.01))
    async with Runtime(bus="memory://", store=store, slots=16) as runtime:
        ids = [await runtime.submit(agent, f"task {n}") for n in range(50)]
        answers = [(await runtime.result(i)).answer for i in ids]
        log = await read_all(runtime.bus, run_log(runtime.run_id))
    assert answers == [f"echo task {n}" for n in range(50)]
    assert sorted(e.episode_id or "" for e in log if isinstance(e.data, EpisodeFinished)) == ids


async def test_a_program_named_as_module_and_attribute(store: str) -> None:
    async with Runtime(bus="memory://", store=store) as runtime:
        episode = await runtime.run("tests.replayed:swarm", "Add.")
    assert episode.answer == "checked: 100"


async def test_a_program_that_cannot_be_loaded_ends_the_episode_with_the_reason(
    store: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    async with Runtime(bus="memory://", store=store) as runtime:
        with anyio.fail_after(5):
            missing = await runtime.run("nowhere:agent", "q")
            broken = await runtime.run("tests.runtime.test_runtime:broken", "q")
    assert missing.reason == broken.reason == "failed"
    assert "can't import 'nowhere'" in (missing.error or "")
    assert "broken" in (broken.error or "")


def broken() -> Agent:
    raise RuntimeError("broken on purpose")


def leaving() -> Agent:
    sys.exit("a script's last line")


async def test_a_program_that_exits_ends_the_episode_and_no_more(
    store: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    async with Runtime(bus="memory://", store=store) as runtime:
        left = await runtime.run("tests.runtime.test_runtime:leaving", "q")
    assert "failed with SystemExit: a script's last line" in (left.error or "")


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def garbling() -> Agent:
    raise ValueError("\ud800")


class Mute:
    def program(self) -> Program:
        raise MuteError


async def test_whatever_a_program_raises_ends_its_episode_and_no_more(
    store: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    async with Runtime(bus="memory://", store=store) as runtime:
        garbled = await runtime.run("tests.runtime.test_runtime:garbling", "q")
        mute = await runtime.run(Mute(), "q")
    assert "failed with ValueError: ?" in (garbled.error or "")
    assert "MuteError: no message, its __str__ raised RuntimeError" in (mute.error or "")


async def test_a_program_that_cannot_be_put_together_ends_the_episode_and_no_more(
    store: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Unfinished:
        def program(self) -> Program:
            raise KeyError("solver")

    caplog.set_level(logging.ERROR)
    async with Runtime(bus="memory://", store=store) as runtime:
        episode = await runtime.run(Unfinished(), "q")
    assert "its program() failed with KeyError: 'solver'" in (episode.error or "")


async def test_an_object_on_a_bus_of_several_processes_is_a_usage_error(store: str) -> None:
    runtime = Runtime(bus="redis://127.0.0.1:1", store=store)
    with pytest.raises(ConfigError, match="workers elsewhere can't see it"):
        await runtime.submit(swarm, "Add.")


async def test_what_is_no_task_or_no_program_is_a_usage_error(store: str) -> None:
    no_task: Any = {"q": 1}
    no_program: Any = echo
    async with Runtime(bus="memory://", store=store) as runtime:
        with pytest.raises(UsageError, match="task must be text or a Task, not dict"):
            await runtime.submit(swarm, no_task)
        with pytest.raises(UsageError, match=r"expected an agent, a swarm or .*, not function"):
            await runtime.submit(no_program, "q")


async def test_a_result_that_was_not_submitted_here(store: str) -> None:
    async with Runtime(bus="memory://", store=store) as runtime:
        with pytest.raises(NotFoundError, match="'nobody' was not submitted"):
            await runtime.result("nobody")
        task = Task(id="t", prompt="q")
        elsewhere = Event.of(
            EpisodeRequested(task=task, program="p:q"), source="runtime/other", run_id="other"
        )
        await runtime.bus.append(episode_log("elsewhere"), 0, [elsewhere])
        with pytest.raises(NotFoundError, match="'elsewhere' was not submitted"):
            await runtime.result("elsewhere")


async def test_events_are_those_of_this_run_and_of_earlier_ones(store: str) -> None:
    async with Runtime(bus="memory://", store=store) as runtime:
        episode = await runtime.run(swarm, "Add.")
        live = await runtime.events(episode.id)
    assert isinstance(live[-1].data, EpisodeFinished)
    async with Runtime(bus="memory://", store=store) as later:
        assert await later.events(episode.id) == live
        with pytest.raises(NotFoundError, match="no episode 'nobody' on memory://"):
            await later.events("nobody")


async def test_a_timeout_ends_the_episode_not_the_caller(store: str) -> None:
    agent = Agent(llm=ScriptedModel("late", delay_s=60))
    async with Runtime(bus="memory://", store=store) as runtime:
        episode = await runtime.run(agent, "q", timeout_s=0.05)
    assert episode.reason == "time_limit"


async def test_an_error_inside_is_recorded_as_the_runs_end(store: str) -> None:
    with pytest.raises(ZeroDivisionError):
        async with Runtime(bus="memory://", store=store):
            raise ZeroDivisionError
    async with open_store(store) as opened:
        (run,) = await opened.runs()
    assert run.reason == "failed"


async def test_an_episode_reported_twice_is_counted_once(store: str) -> None:
    async with Runtime(bus="memory://", store=store) as runtime:
        episode = await runtime.run(swarm, "Add.")
        finished = (await read_all(runtime.bus, episode_log(episode.id)))[-1]
        await runtime.bus.send_mail(run_log(runtime.run_id), finished)
        await runtime.run(swarm, "Add.")
        log = await read_all(runtime.bus, run_log(runtime.run_id))
    assert len(of_kind(log, EpisodeFinished)) == 2


async def test_what_has_finished_is_not_kept_in_memory_and_its_result_is_there(store: str) -> None:
    async with Runtime(bus="memory://", store=store) as runtime:
        episodes = [await runtime.run(swarm, "Add.") for _ in range(3)]
        assert not runtime._requests.unfinished  # pyright: ignore[reportPrivateUsage]
        assert [await runtime.result(episode.id) for episode in episodes] == episodes


async def test_an_agent_is_let_go_once_its_episodes_have_finished(store: str) -> None:
    async with Runtime(bus="memory://", store=store) as runtime:
        agent = Agent(llm=ScriptedModel(echo, delay_s=0.01))
        gone = weakref.ref(agent)
        ids = [await runtime.submit(agent, f"task {n}") for n in range(3)]
        del agent
        answers = [(await runtime.result(i)).answer for i in ids]
        await wait_until(lambda: gc.collect() >= 0 and gone() is None)
    assert answers == [f"echo task {n}" for n in range(3)]


async def test_an_episodes_log_says_what_kind_of_object_it_ran(store: str) -> None:
    async with Runtime(bus="memory://", store=store) as runtime:
        episode = await runtime.run(swarm, "Add.")
        (requested,) = of_kind(
            await read_all(runtime.bus, episode_log(episode.id)), EpisodeRequested
        )
    assert requested.program == f"local:Swarm/{episode.id}"


async def test_a_worker_that_refuses_a_begun_episode_ends_it(store: str) -> None:
    """Its first worker died, and then its run was resumed with other code."""
    async with Runtime(bus="memory://", store=store, slots=0) as runtime:
        episode_id = await runtime.submit("tests.replayed:swarm", "Add.")
        log = episode_log(episode_id)
        async with runtime.bus.consume(EPISODES_QUEUE, consumer="dead") as consumer:
            delivery = await consumer.take()
            begun = delivery.event
            assert isinstance(begun.data, EpisodeRequested)
            data = begun.data.model_copy(update={"code_version": "1"})
            begun = begun.model_copy(update={"data": data})
            await runtime.bus.append(log, 0, [begun])
            await runtime.bus.put(EPISODES_QUEUE, begun)
            await delivery.ack()
        resumed = NodeInfo(name=f"launcher/{runtime.run_id}", kind="launcher", version="2")
        await runtime.bus.announce(resumed)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(Worker(runtime.bus, name="w2", version="2").run)
            with anyio.fail_after(5):
                await runtime.result(episode_id)
            tasks.cancel_scope.cancel()
        episode = await runtime.result(episode_id)
    assert episode.reason == "failed"
    assert "code version 2, the episode wants 1" in (episode.error or "")


async def test_a_drained_worker_ends_what_it_has(store: str) -> None:
    async with Runtime(bus="memory://", store=store, slots=0) as runtime:
        worker = Worker(
            runtime.bus,
            name="w1",
            programs={"local:slow": Agent(llm=ScriptedModel("done", delay_s=0.1))},
        )
        episode_id = await runtime.submit("local:slow", "q")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(worker.run)
            await wait_until(lambda: worker.running == 1)
            worker.drain()
        assert worker.health()["status"] == "draining"
        assert (await runtime.result(episode_id)).answer == "done"


def test_run_works_without_a_loop(home: Path) -> None:
    assert swarm.run("Add.").answer == "checked: 100"
    assert (home / ".aworld" / "aworld.db").exists()


async def test_run_works_inside_a_running_loop_as_in_a_notebook(home: Path) -> None:
    assert swarm.run("Add.").answer == "checked: 100"
    assert Runners.sync_run("Add.", agent=swarm).answer == "checked: 100"
    assert (await Runners.run("Add.", agent=swarm)).answer == "checked: 100"


@pytest.mark.usefixtures("home")
def test_a_failed_run_raises_with_the_command_that_shows_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR)
    with pytest.raises(AWorldError, match=r"has no model.*; see it with: aworld log "):
        Agent().run("q")


@pytest.mark.usefixtures("home")
def test_an_interrupt_in_an_agents_code_ends_the_run_and_is_all_that_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def interrupt(_: ModelRequest) -> Reply:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Agent(llm=ScriptedModel(interrupt)).run("q")
    assert "UnboundLocalError" not in caplog.text


def test_an_interrupted_notebook_cell_ends_the_work(tmp_path: Path) -> None:
    """The interrupt comes while the cell waits for another thread's event loop."""
    script = """
import asyncio, os, signal, threading
from aworld_runtime.runtime import run_sync

async def work():
    threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT]).start()
    try:
        await asyncio.sleep(60)
    finally:
        print("cleaned up")

def cell():
    try:
        run_sync(work)
    except KeyboardInterrupt:
        print("interrupted")
    loop.stop()

loop = asyncio.new_event_loop()
loop.call_soon(cell)
loop.run_forever()
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert (done.stdout, done.stderr) == ("cleaned up\ninterrupted\n", "")


async def test_run_sync_raises_what_the_work_raised() -> None:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        run_sync(fail)


async def test_environment_settings_reach_an_agents_model(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = {"role": "assistant", "content": "hello"}
    body = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
    async with engine(lambda _: Answer(body)) as served:
        monkeypatch.setenv("AWORLD_LLM_BASE_URL", served.url)
        monkeypatch.setenv("AWORLD_LLM_MODEL_NAME", "tiny")
        monkeypatch.setenv("AWORLD_LLM_API_KEY", "secret")
        agent = Agent(llm=LLMClient())
        for _ in range(2):  # two runtimes, each with connections of its own
            async with Runtime(bus="memory://", store=store) as runtime:
                assert (await runtime.run(agent, "hi")).answer == "hello"
    assert [r.headers["authorization"] for r in served.requests] == ["Bearer secret"] * 2


async def test_a_tool_call_of_a_user_function(store: str) -> None:
    def shout(text: str) -> str:
        """Say it loudly."""
        return text.upper()

    model = ScriptedModel([ToolCall(id="c1", name="shout", arguments={"text": "hi"}), "done"])
    async with Runtime(bus="memory://", store=store) as runtime:
        episode = await runtime.run(Agent(llm=model, tools=[shout]), "shout")
    (trajectory,) = episode.trajectories
    assert [m.content for m in trajectory.messages if m.role == "tool"] == ["HI"]


async def test_a_foreign_event_in_the_queue_is_a_dead_letter(store: str) -> None:
    async with Runtime(bus="memory://", store=store) as runtime:
        stray = Event.of(EpisodeFinished(), source="test/1")
        await runtime.bus.put(EPISODES_QUEUE, stray)
        assert (await runtime.run(swarm, "Add.")).answer == "checked: 100"
        (dead,) = await runtime.bus.dead_letters(EPISODES_QUEUE)
    assert dead.reason == "expected episode.requested, got episode.finished"
