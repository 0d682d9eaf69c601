"""Replay: identical, or stopped at the first difference."""
# ruff: noqa: ARG002 - nodes have a given signature

import json
import logging
from collections.abc import Awaitable, Callable
from functools import partial

import anyio
import pytest
from pydantic import JsonValue

from aworld_runtime import Agent, Swarm
from aworld_runtime.bus.base import read_all
from aworld_runtime.bus.open import open_bus
from aworld_runtime.errors import DivergenceError, ReplayError
from aworld_runtime.events import (
    DeliveryDeadLettered,
    DeliveryHandled,
    EpisodeFinished,
    Event,
    EventData,
    MessagePosted,
    ModelRequested,
    Registry,
    ToolCalled,
)
from aworld_runtime.messages import ToolCall
from aworld_runtime.models.scripted import ScriptedModel
from aworld_runtime.names import episode_log
from aworld_runtime.nodes.context import Context
from aworld_runtime.nodes.node import Program, Runnable
from aworld_runtime.replay.replay import Divergence, Rerun, inspect, replay
from tests.episodes import (
    EXACT_MATCH,
    Adder,
    adding,
    adding_swarm,
    owner_of,
    request_episode,
    run_episode,
)
from tests.replayed import changed_swarm, dice, swarm


async def record(
    program: Runnable, *, environment: str | None = None, timeout_s: float | None = None
) -> list[Event]:
    """The log of a finished episode, as a store gives it back."""
    async with open_bus("memory://") as bus:
        requested = request_episode(
            environment=environment, expected="checked: 100", timeout_s=timeout_s
        )
        events = await run_episode(bus, requested, program.program())
    registry = Registry()
    return [registry.decode(registry.encode(e), seq=e.seq) for e in events]


async def diverge(events: list[Event], program: Program) -> Divergence:
    report = await replay(events, program)
    assert not report.identical
    assert report.divergence is not None
    return report.divergence


def seq_of(events: list[Event], role: str, kind: type[EventData]) -> int:
    return next(e.seq for e in events if e.role == role and isinstance(e.data, kind))


async def test_replay_is_identical_without_one_live_call() -> None:
    model, tool = ScriptedModel(adding), Adder()
    again = adding_swarm(model, tool)
    events = await record(swarm, environment=EXACT_MATCH)
    report = await replay(events, again.program())
    assert report.identical
    assert (report.live_calls, len(model.requests), tool.ran) == (0, 0, [])
    assert report.events == len(events)
    assert report.handlers == sum(e.type == "delivery.handled" for e in events)
    assert report.episode == events[0].episode_id


async def test_inspect_folds_the_log() -> None:
    episode = inspect(await record(swarm))
    assert episode.answer == "checked: 100"
    assert [t.role for t in episode.trajectories] == ["solver", "verifier"]


async def test_one_word_of_a_prompt_stops_at_that_agents_request() -> None:
    events = await record(swarm)
    found = await diverge(events, changed_swarm().program())
    assert (found.seq, found.role) == (seq_of(events, "verifier", ModelRequested), "verifier")
    assert "differs in data.preamble, data.prompt_sha256" in found.message
    assert "Check." in found.recorded
    assert "Verify." in found.replayed


async def test_a_changed_tool_list_stops_at_the_first_request() -> None:
    def multiply(a: int, b: int) -> int:
        return a * b

    model = ScriptedModel(adding)
    solver = Agent("solver", llm=model, tools=[Adder(), multiply], system_prompt="Add.")
    changed = Swarm(solver, Agent("verifier", llm=model, system_prompt="Check."))
    events = await record(swarm)
    found = await diverge(events, changed.program())
    assert found.seq == seq_of(events, "solver", ModelRequested)
    assert "multiply" in found.replayed
    assert "multiply" not in found.recorded


async def test_reordered_tools_are_a_change() -> None:
    def multiply(a: int, b: int) -> int:
        return a * b

    events = await record(Agent("solver", llm=ScriptedModel("5"), tools=[Adder(), multiply]))
    again = Agent("solver", llm=ScriptedModel("5"), tools=[multiply, Adder()])
    found = await diverge(events, again.program())
    assert found.seq == seq_of(events, "solver", ModelRequested)


async def test_random_drawn_past_the_context_diverges_where_it_was_used() -> None:
    events = await record(dice)
    found = await diverge(events, dice.program())
    assert found.seq == seq_of(events, "dice", EpisodeFinished)
    assert found.message.endswith("this time it differs in data.answer")


async def test_a_role_that_the_program_lacks_is_named() -> None:
    events = await record(swarm)
    whole = swarm.program()
    found = await diverge(events, Program(nodes=whole.nodes[1:], tools=whole.tools))
    assert found.role == "solver"
    assert "no such role; it has: verifier, swarm, environment" in found.message


class Failing:
    """Fails in one of three ways."""

    role = "failing"
    subscriptions = ("episode.requested",)

    def __init__(self, how: str) -> None:
        self.how = how

    async def handle(self, ctx: Context, event: Event) -> None:
        async def outside() -> JsonValue:
            raise ConnectionError("nobody there")

        ctx.emit(MessagePosted(content="trying"), to="nobody")
        match self.how:
            case "code":
                raise KeyError("missing")
            case "outside":
                await ctx.record("page", outside)
            case _:
                ctx.emit(EpisodeFinished(answer="fine"))

    def program(self) -> Program:
        return Program(nodes=(self,))


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """These nodes fail on purpose."""
    caplog.set_level(logging.ERROR)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("how", ["code", "outside"])
async def test_a_failure_replays_as_the_same_failure(how: str) -> None:
    events = await record(Failing(how))
    assert inspect(events).reason == "failed"
    report = await replay(events, Failing(how).program())
    assert report.identical, report.divergence


@pytest.mark.usefixtures("quiet")
async def test_a_mended_failure_is_a_divergence() -> None:
    found = await diverge(await record(Failing("code")), Failing("not").program())
    assert "emitted episode.finished" in found.message


@pytest.mark.usefixtures("quiet")
async def test_a_new_failure_is_a_divergence() -> None:
    found = await diverge(await record(Failing("not")), Failing("code").program())
    assert "episode.finished; this time it did nothing more" in found.message


@pytest.mark.usefixtures("quiet")
async def test_an_agent_whose_model_failed_replays() -> None:
    program = Agent("solver", llm=ScriptedModel([KeyError("x")]))
    report = await replay(await record(program), program.program())
    assert report.identical, report.divergence


async def test_turn_limit_and_malformed_calls_replay() -> None:
    bad = ToolCall(id="c1", name="add", malformed="{")
    for model in (ScriptedModel([bad], repeat_last=True), ScriptedModel(adding)):
        program = Agent("solver", llm=model, tools=[Adder()], max_turns=2)
        events = await record(program)
        assert inspect(events).reason in {"turn_limit", "malformed"}
        assert (await replay(events, program.program())).identical


async def test_a_log_that_begins_in_the_middle_is_refused() -> None:
    events = await record(swarm)
    with pytest.raises(ReplayError, match=r"expected episode\.requested"):
        await replay(events[3:], swarm.program())
    with pytest.raises(ReplayError, match="begins with nothing"):
        await replay([], swarm.program())


async def test_an_unfinished_log_replays_as_far_as_it_goes() -> None:
    events = await record(swarm)
    for cut in range(1, len(events) - 1):  # the last two come in one append
        report = await replay(events[:cut], swarm.program())
        assert report.identical, (cut, report.divergence)
        assert not report.finished
    assert (await replay(events, swarm.program())).finished


async def test_one_handler_can_be_run_again() -> None:
    events = await record(swarm)
    rerun = Rerun(events, changed_swarm().program())
    ended = [e for e in events if isinstance(e.data, DeliveryHandled | DeliveryDeadLettered)]
    assert list(rerun.outcomes) == ended
    differing: set[str] = set()
    for outcome in ended:
        try:
            await rerun.handler(outcome)
        except DivergenceError:
            differing.add(outcome.role)
    assert differing == {"verifier"}
    with pytest.raises(TypeError, match=r"episode\.requested \(seq 1\) ends no handler"):
        await rerun.handler(events[0])


class Said:
    """Runs a function as its handler."""

    role = "said"

    def __init__(
        self,
        says: Callable[[Context], Awaitable[None]],
        subscriptions: tuple[str, ...] = ("episode.requested",),
    ) -> None:
        self.says = says
        self.subscriptions = subscriptions

    async def handle(self, ctx: Context, event: Event) -> None:
        await self.says(ctx)

    def program(self) -> Program:
        return Program(nodes=(self,))


async def calls(ctx: Context, arguments: dict[str, JsonValue]) -> None:
    ctx.emit(ToolCalled(call=ToolCall(id="c1", name="none", arguments=arguments)), to="nobody")
    ctx.emit(EpisodeFinished())


@pytest.mark.parametrize("other", [True, 1.0, None, "1"])
async def test_another_kind_of_value_is_another_value(other: JsonValue) -> None:
    """Python finds 1, 1.0 and True equal; a tool, and whoever reads JSON, does not."""
    events = await record(Said(partial(calls, arguments={"a": 1})))
    found = await diverge(events, Said(partial(calls, arguments={"a": other})).program())
    assert found.type == "tool.called"
    assert found.advice[0] == f"data.call.arguments.a: 1 is now {json.dumps(other)}"


async def test_numbers_that_json_lacks_and_the_order_of_keys_are_no_difference() -> None:
    events = await record(Said(partial(calls, arguments={"a": float("nan"), "b": 1})))
    again = Said(partial(calls, arguments={"b": 1, "a": float("nan")}))
    report = await replay(events, again.program())
    assert report.identical, report.divergence


async def test_what_is_said_before_an_answer_and_was_said_after_it_is_a_difference() -> None:
    async def look() -> JsonValue:
        return 1

    async def first(ctx: Context) -> None:
        await ctx.record("page", look)
        ctx.emit(MessagePosted(content="x"), to="nobody")
        ctx.emit(EpisodeFinished())

    async def last(ctx: Context) -> None:
        ctx.emit(MessagePosted(content="x"), to="nobody")
        await ctx.record("page", look)
        ctx.emit(EpisodeFinished())

    found = await diverge(await record(Said(first)), Said(last).program())
    assert found.message.endswith("recorded value.recorded; this time it emitted message.posted")


@pytest.mark.usefixtures("quiet")
async def test_a_failure_that_says_something_else_is_a_difference() -> None:
    async def fail(ctx: Context, what: object) -> None:
        raise ValueError(f"no {what}")

    events = await record(Said(partial(fail, what="page 1")))
    found = await diverge(events, Said(partial(fail, what="page 2")).program())
    assert (found.recorded, found.replayed) == (
        "failed with ValueError: no page 1",
        "failed with ValueError: no page 2",
    )
    events = await record(Said(partial(fail, what=object())))
    assert (await replay(events, Said(partial(fail, what=object())).program())).identical


@pytest.mark.usefixtures("quiet")
async def test_what_failed_in_a_task_group_is_told_and_compared() -> None:
    async def fails(ctx: Context, error: Exception) -> None:
        raise ExceptionGroup("unhandled errors in a TaskGroup", [error])

    events = await record(Said(partial(fails, error=KeyError("a"))))
    said = "unhandled errors in a TaskGroup (1 sub-exception); KeyError: 'a'"
    assert inspect(events).error == f"said: ExceptionGroup: {said}"
    assert (await replay(events, Said(partial(fails, error=KeyError("a"))).program())).identical
    found = await diverge(events, Said(partial(fails, error=KeyError("b"))).program())
    assert found.recorded == f"failed with ExceptionGroup: {said}"


@pytest.mark.usefixtures("quiet")
async def test_a_takeover_that_strays_inside_a_task_group_says_where_and_replays() -> None:
    async def says(ctx: Context, what: str) -> None:
        async def say() -> None:
            ctx.emit(MessagePosted(content=what), to="nobody")
            await ctx.complete(ScriptedModel("x"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(say)
        ctx.emit(EpisodeFinished())

    events = await record(Said(partial(says, what="one")))
    log, other = episode_log(events[0].episode_id or ""), Said(partial(says, what="other"))
    async with open_bus("memory://") as bus:
        await bus.append(log, 0, events[: seq_of(events, "said", ModelRequested)])
        await owner_of(bus, events[0], other.program(), worker="w2").run()
        taken_over = await read_all(bus, log)
    assert "said: DivergenceError: at seq 4, said rec" in (inspect(taken_over).error or "")
    assert (await replay(taken_over, other.program())).identical


@pytest.mark.usefixtures("quiet")
async def test_a_handler_that_cancels_itself_replays() -> None:
    async def cancels(ctx: Context) -> None:
        raise anyio.get_cancelled_exc_class()

    events = await record(Said(cancels))
    assert inspect(events).reason == "failed"
    assert (await replay(events, Said(cancels).program())).identical


async def test_what_a_handler_did_before_the_episode_was_cut_off_is_compared() -> None:
    """As where it was cancelled, or its time was up, while a model thought."""

    def agent(prompt: str) -> Agent:
        return Agent("solver", llm=ScriptedModel("late", delay_s=60), system_prompt=prompt)

    events = await record(agent("Add."), timeout_s=0.1)
    assert inspect(events).reason == "time_limit"
    report = await replay(events, agent("Add.").program())
    assert (report.identical, report.handlers) == (True, 2)
    found = await diverge(events, agent("Sum up.").program())
    assert (found.seq, found.cause) == (
        seq_of(events, "solver", ModelRequested),
        "changed prompt",
    )


async def test_an_event_that_would_be_delivered_otherwise_is_a_difference() -> None:
    async def ends(ctx: Context) -> None:
        ctx.emit(EpisodeFinished())

    events = await record(Said(ends))
    found = await diverge(events, Said(ends, ("message.posted",)).program())
    assert (found.seq, found.replayed) == (1, "is not delivered to said")
    assert found.advice == ("said subscribed to episode.requested, now to message.posted",)
    found = await diverge(events, Program(nodes=(Said(ends), dice)))
    assert (found.seq, found.replayed) == (1, "is delivered to dice")
    unheard = Said(ends, ("episode.requested", "human.asked"))
    assert (await replay(events, unheard.program())).identical
