"""The debugger: of records, of live episodes, and from one to the other."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import anyio
import pytest

from aworld_runtime import Runtime
from aworld_runtime.bus.open import open_bus
from aworld_runtime.bus.server import PrivateServer, find_server_binary
from aworld_runtime.errors import ConfigError, NotFoundError, PredicateError, UsageError
from aworld_runtime.events import (
    DeliveryHandled,
    Event,
    ToolCalled,
    ToolReturned,
)
from aworld_runtime.models.base import ModelRequest
from aworld_runtime.models.scripted import Reply, ScriptedModel
from aworld_runtime.replay.debugger import Debugger, Stop
from tests.commands import serving
from tests.episodes import (
    Adder,
    Gate,
    adding,
    adding_program,
    adding_swarm,
    request_episode,
    run_episode,
)
from tests.replayed import changed_swarm
from tests.runtime.test_questions import Careful
from tests.services import missing
from tests.waiting import wait_until


@pytest.fixture
async def events() -> list[Event]:
    """A finished episode of a solver, who calls tools in two turns, and of a verifier."""
    async with open_bus("memory://") as bus:
        return await run_episode(bus, request_episode(), adding_program()[0])


def places(events: Sequence[Event], kind: type) -> list[int]:
    return [event.seq for event in events if isinstance(event.data, kind)]


# --- records -----------------------------------------------------------------------------------------------------------


async def test_a_record_is_stepped_through_from_its_first_event_to_its_end(
    events: list[Event],
) -> None:
    debugger = Debugger(events)
    assert debugger.event == events[0]
    passed = [debugger.seq]
    while (stop := await debugger.step()).why != "end":
        assert stop.why == "moved"
        passed.append(stop.seq)
    assert passed == list(range(1, len(events) + 1))
    assert stop.event == events[-1]


async def test_it_stops_at_breakpoints_until_they_are_cleared(events: list[Event]) -> None:
    debugger = Debugger(events)
    number = await debugger.break_at("type=tool.called and data.b=40")
    await debugger.break_at("role=verifier and model.completed")
    assert [await where(debugger) for _ in range(3)] == [
        ("breakpoint", "tool.called", "1: type=tool.called and data.b=40"),
        ("breakpoint", "model.completed", "2: role=verifier and type=model.completed"),
        ("end", "episode.finished", ""),
    ]
    await debugger.clear(number)
    debugger.goto(1)
    assert (await debugger.continue_()).event.role == "verifier"
    with pytest.raises(UsageError, match="no breakpoint 1; there are: 2"):
        await debugger.clear(number)
    with pytest.raises(PredicateError):
        await debugger.break_at("type=")


async def where(debugger: Debugger) -> tuple[str, str, str]:
    stop = await debugger.continue_()
    return stop.why, stop.event.type, stop.detail


async def test_where_it_goes_until_is_no_breakpoint_and_there_are_not_too_many(
    events: list[Event],
) -> None:
    debugger = Debugger(events)
    await debugger.until("tool.called")
    assert [await debugger.break_at("role=nobody") for _ in range(100)] == [*range(1, 101)]
    with pytest.raises(UsageError, match="there are 100 breakpoints, as many as"):
        await debugger.break_at("role=nobody")
    assert len(debugger.breakpoints) == 100


async def test_next_goes_to_the_end_of_a_handler_and_until_to_an_event(events: list[Event]) -> None:
    debugger = Debugger(events)
    ends = places(events, DeliveryHandled)
    assert (await debugger.next()).seq == ends[0]
    of_solver = next(seq for seq in ends[1:] if events[seq - 1].role == "solver")
    assert (await debugger.next("solver")).seq == of_solver
    assert (await debugger.until("tool.returned")).seq == places(events, ToolReturned)[0]
    assert await debugger.until(len(events) - 2) == Stop("moved", events[-3])
    assert (debugger.back().seq, debugger.goto(2).seq, debugger.back().seq) == (
        len(events) - 3,
        2,
        1,
    )
    assert debugger.back().why == "start"
    assert debugger.breakpoints == {}
    with pytest.raises(UsageError, match="event 1 is not ahead of 1"):
        await debugger.until(1)
    with pytest.raises(UsageError, match="no event 900"):
        debugger.goto(900)


async def test_a_breakpoint_stops_every_way_forwards(events: list[Event]) -> None:
    debugger = Debugger(events)
    await debugger.break_at("model.requested")
    for move in (debugger.next("verifier"), debugger.until("episode.finished")):
        assert (await move).why == "breakpoint"


async def test_the_program_runs_again_as_the_record_is_passed(events: list[Event]) -> None:
    program, model, tool = adding_program()
    debugger = Debugger(events, program)
    assert (await debugger.continue_()).why == "end"
    assert (len(model.requests), tool.ran) == (0, [])


async def test_a_difference_stops_it_and_it_can_go_on(events: list[Event]) -> None:
    debugger = Debugger(events, changed_swarm().program())
    stop = await debugger.continue_()
    assert (stop.why, stop.event.role, stop.event.type) == (
        "diverged",
        "verifier",
        "delivery.handled",
    )
    assert stop.difference is not None
    assert "data.preamble" in stop.detail
    assert (await debugger.continue_()).why == "end"


async def test_at_any_event_it_shows_what_an_agent_knows_and_has_to_do(events: list[Event]) -> None:
    debugger = Debugger(events)
    first, *others = places(events, ToolCalled)
    debugger.goto(others[1])
    asked = next(e for e in events[: first - 1] if e.to == "solver")
    solver = debugger.role("solver")
    assert [call.seq for call in solver.open_calls] == [first, *others[:2]]
    assert [m.role for m in solver.messages] == ["system", "user", "assistant"]
    assert (len(solver.turns), solver.pending, solver.to_handle) == (1, (), (asked.seq,))
    state = debugger.state()
    assert state.to_handle == {
        "swarm": (),
        "solver": (asked.seq,),
        "verifier": (),
        "environment": (),
    }
    assert (state.open_calls, state.idle, state.reason) == (solver.open_calls, False, None)

    returned = places(events, ToolReturned)[0]
    debugger.goto(returned)
    solver = debugger.role("solver")
    assert [m.content for m in solver.pending] == ["30"]
    assert solver.messages[-1].content == "30"
    assert solver.to_handle == (returned,)
    debugger.goto(len(events))
    assert (debugger.state().answer, debugger.state().reason) == ("checked: 100", "answered")
    with pytest.raises(
        UsageError, match="no role 'judge' in this episode; there are: solver, verifier"
    ):
        debugger.role("judge")


async def test_before_anything_happened_the_request_is_what_is_to_be_handled(
    events: list[Event],
) -> None:
    assert Debugger(events).state().to_handle == {
        "swarm": (1,),
        "solver": (),
        "verifier": (),
        "environment": (),
    }


async def test_what_has_ended_can_be_neither_paused_nor_forked_by_nobody(
    events: list[Event],
) -> None:
    debugger = Debugger(events)
    for attempt in (debugger.pause(), debugger.resume(), debugger.edit({"data.content": 1})):
        with pytest.raises(UsageError):
            await attempt


# --- live ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[Runtime]:
    async with Runtime(bus="memory://", store=f"sqlite:///{tmp_path}/aworld.db") as opened:
        yield opened


async def test_a_live_episode_is_stepped_and_watched(runtime: Runtime) -> None:
    model, tool = ScriptedModel(adding), Adder()
    episode = await runtime.submit(adding_swarm(model, tool), "Add it all.", paused=True)
    async with runtime.debug(episode) as debugger:
        assert (await debugger.next()).event.role == "swarm"
        assert len(model.requests) == 0
        assert (await debugger.step()).event.type == "model.requested"
        assert (await debugger.next()).event.role == "solver"
        assert (len(model.requests), tool.ran) == (1, [])
        assert (await debugger.step()).event.type == "tool.returned"
        assert tool.ran == [(10, 20)]
        state = debugger.state()
        assert (state.paused, [call.call.id for call in state.open_calls]) == (True, ["c2", "c3"])
        assert (await debugger.next("verifier")).event.role == "verifier"
        assert (await debugger.continue_()).why == "end"
    assert (await runtime.result(episode)).answer == "checked: 100"


async def test_a_live_episode_stops_at_breakpoints_before_anything_follows(
    runtime: Runtime,
) -> None:
    tool = Adder()
    episode = await runtime.submit(
        adding_swarm(ScriptedModel(adding), tool), "Add it all.", paused=True
    )
    async with runtime.debug(episode) as debugger:
        number = await debugger.break_at("tool.called and a=10")
        stop = await debugger.continue_()
        assert (stop.why, stop.event.type, stop.detail) == (
            "breakpoint",
            "tool.called",
            "1: type=tool.called and a=10",
        )
        await anyio.wait_all_tasks_blocked()
        assert tool.ran == []
        assert debugger.now().breakpoints == ("type=tool.called and a=10",)
        await debugger.clear(number)
        stop = await debugger.until("role=solver and answer.proposed")
        assert (stop.why, stop.event.type) == ("moved", "answer.proposed")
        assert len(tool.ran) == 3
        assert debugger.now().breakpoints == ()
        assert debugger.goto(1).event.type == "episode.requested"
        assert (await debugger.continue_()).why == "end"
    assert (await runtime.result(episode)).answer == "checked: 100"


async def test_leaving_clears_ones_own_breakpoints_and_leaves_the_pause(
    runtime: Runtime,
) -> None:
    episode = await runtime.submit(
        adding_swarm(ScriptedModel(adding), Adder()), "Add it all.", paused=True
    )
    async with runtime.debug(episode) as debugger:
        await debugger.break_at("model.requested")
        async with runtime.debug(episode) as second:
            assert [str(each) for each in second.breakpoints.values()] == ["type=model.requested"]
            await second.break_at("tool.returned")
            assert (await second.continue_()).event.type == "model.requested"
        assert debugger.live is not None
        await debugger.live.look()
        assert debugger.now().breakpoints == ("type=model.requested",)
    async with runtime.debug(episode) as third:
        assert (third.breakpoints, third.now().paused) == ({}, True)
        await third.resume()
    assert (await runtime.result(episode)).reason == "answered"


async def test_who_pauses_meanwhile_stops_the_debugger_too(runtime: Runtime) -> None:
    gate = Gate("add")
    episode = await runtime.submit(adding_swarm(ScriptedModel(adding), gate), "Add it all.")
    async with runtime.debug(episode) as debugger, anyio.create_task_group() as tasks:
        stops: list[Stop] = []

        async def go_on() -> None:
            stops.append(await debugger.continue_())

        await gate.reached.wait()
        tasks.start_soon(go_on)
        async with runtime.debug(episode) as other:
            await other.pause()
        await wait_until(lambda: bool(stops))
        assert (stops[0].why, stops[0].detail) == ("paused", "debugger")
        gate.open.set()
        await debugger.resume()
    assert (await runtime.result(episode)).reason is not None


async def test_it_waits_for_nobody_who_has_to_be_asked(runtime: Runtime) -> None:
    episode = await runtime.submit(Careful("May I?"), "Do it.", paused=True)
    async with runtime.debug(episode) as debugger:
        stop = await debugger.continue_()
        (question,) = debugger.state().questions
        assert (stop.why, stop.detail) == ("waiting", f"for an answer to event {question}")
        assert (await debugger.step()).why == "waiting"
        await runtime.answer(episode, "yes")
        assert (await debugger.until("human.answered")).why == "moved"
        assert debugger.role("careful").pending[-1].content == "yes"
        assert (await debugger.continue_()).why == "end"


async def test_an_unknown_episode_cannot_be_debugged(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aworld_runtime.runtime.HEARD_S", 0.05)  # so long the test waits
    with pytest.raises(NotFoundError, match="no episode 'nobody'"):
        async with runtime.debug("nobody"):
            pass


@pytest.fixture
async def bus_url(tmp_path: Path) -> AsyncIterator[str]:
    try:
        find_server_binary()
    except ConfigError as error:
        missing("Redis", str(error))
    async with PrivateServer(tmp_path) as server:
        yield server.url


@pytest.mark.chaos
@pytest.mark.timeout(60)
async def test_at_a_breakpoint_another_worker_takes_over_and_the_debugger_goes_on(
    bus_url: str, tmp_path: Path
) -> None:
    def worker(name: str) -> AbstractContextManager[subprocess.Popen[str]]:
        (folder := tmp_path / name).mkdir()
        arguments = ("--bus", bus_url, "--name", name)
        environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
        return serving(
            "worker", *arguments, says=" slots, tools: ", cwd=folder, environment=environment
        )

    store = f"sqlite:///{tmp_path}/aworld.db"
    async with Runtime(bus=bus_url, store=store, slots=0) as runtime:
        with worker("w1") as first:
            episode = await runtime.submit("tests.replayed:swarm", "Add it all.", paused=True)
            async with runtime.debug(episode) as debugger:
                await debugger.break_at("type=tool.called and a=30")
                assert (await debugger.continue_()).event.type == "tool.called"
                stopped = debugger.now()
                first.kill()
                with worker("w2"):
                    stop = await debugger.until("type=episode.taken_over and worker=w2")
                    assert stop.why == "moved"
                    assert (debugger.state().open_calls, debugger.state().paused) == (
                        stopped.open_calls,
                        True,
                    )
                    assert debugger.now().breakpoints[0] == "type=tool.called and a=30"
                    await debugger.clear()
                    await debugger.next("solver")
                    assert (await debugger.continue_()).why == "end"
        assert (await runtime.result(episode)).answer == "checked: 100"


# --- from a record to a live one --------------------------------------------------------------------------------------------


async def recorded(runtime: Runtime) -> str:
    episode = await runtime.run(adding_swarm(ScriptedModel(adding), Adder()), "Add it all.")
    assert episode.answer == "checked: 100"
    return episode.id


async def test_an_edited_event_goes_on_live_and_paused_in_a_fork(runtime: Runtime) -> None:
    original = await recorded(runtime)
    model, tool = ScriptedModel(adding), Adder()
    async with runtime.debug(original, adding_swarm(model, tool)) as debugger:
        await debugger.break_at("type=tool.called and call.id=c4")
        at = (await debugger.until("type=tool.returned and content=70")).seq
        stop = await debugger.edit({"data.content": 12})
        assert (stop.event.type, stop.event.data) == (
            "tool.returned",
            ToolReturned(name="add", content=12),
        )
        assert stop.seq == at + 2
        await anyio.wait_all_tasks_blocked()
        assert (len(model.requests), tool.ran, debugger.now().paused) == (0, [], True)
        assert debugger.role("solver").pending[-1].content == "12"
        stop = await debugger.continue_()
        assert (stop.why, stop.event.type) == ("breakpoint", "tool.called")
        assert tool.ran == []
        assert (await debugger.step()).event.type == "delivery.handled"
        assert (await debugger.step()).event.type == "tool.returned"
        assert tool.ran == [(30, 12)]
        assert (await debugger.continue_()).why == "end"
        assert debugger.role("solver").messages[-1].content == "42"
        fork = debugger.event.episode_id
    assert [await answer_of_solver(runtime, e) for e in (fork, original)] == ["42", "100"]


async def answer_of_solver(runtime: Runtime, episode: str | None) -> str:
    solver = (await runtime.result(episode or "")).trajectory("solver")
    assert solver is not None
    return solver.turns[-1].completion.text


async def test_a_fork_goes_on_from_the_position_with_another_program(runtime: Runtime) -> None:
    original = await recorded(runtime)

    def brief(_: ModelRequest) -> Reply:
        return "brief"

    other = adding_swarm(ScriptedModel(brief), Adder())
    async with runtime.debug(original) as debugger:
        at = (await debugger.until("type=model.requested and role=verifier")).seq - 1
        debugger.goto(at)
        stop = await debugger.fork(program=other)
        assert (stop.event.type, stop.seq) == ("episode.requested", at + 2)
        assert (await debugger.continue_()).why == "end"
        assert debugger.state().answer == "brief"


async def test_a_fork_that_is_left_paused_is_cancelled_and_forks_can_be_forked(
    runtime: Runtime,
) -> None:
    original = await recorded(runtime)
    program = adding_swarm(ScriptedModel(adding), Adder())
    async with runtime.debug(original, program) as debugger:
        await debugger.until("type=tool.returned and content=30")
        await debugger.edit({"data.content": 31})
        first = debugger.event.episode_id
        await debugger.edit({"data.content": 32})
        second = debugger.event.episode_id
        assert debugger.role("solver").pending[-1].content == "32"
    for fork in (first, second):
        assert fork is not None
        assert (await runtime.result(fork)).reason == "cancelled"


async def test_the_request_itself_cannot_be_edited(runtime: Runtime) -> None:
    async with runtime.debug(await recorded(runtime)) as debugger:
        with pytest.raises(UsageError, match="request itself"):
            await debugger.edit({"data.seed": 1})
