"""The context: what a handler sees, and how its journal repeats what it got."""
# ruff: noqa: ARG002 - nodes have a given signature

import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import pytest
from pydantic import JsonValue

from aworld_runtime import Agent
from aworld_runtime.bus.base import Bus
from aworld_runtime.bus.open import open_bus
from aworld_runtime.errors import DivergenceError, ModelUnavailableError
from aworld_runtime.events import (
    EpisodeFinished,
    EpisodeRequested,
    Event,
    MessagePosted,
    ModelFailed,
    ModelRequested,
    ValueRecorded,
)
from aworld_runtime.messages import ModelSpec, ToolCall
from aworld_runtime.models.base import ChatModel, ModelRequest
from aworld_runtime.models.scripted import Reply, ScriptedModel
from aworld_runtime.nodes.context import Context
from aworld_runtime.nodes.history import History
from aworld_runtime.nodes.journal import Journal, journals
from aworld_runtime.nodes.node import Program
from tests.episodes import Adder, of_kind, one, owner_of, request_episode, run_episode


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    async with open_bus("memory://") as opened:
        yield opened


class Sampler:
    """Uses everything a context offers but the model."""

    role = "sampler"
    subscriptions = ("episode.requested",)

    async def handle(self, ctx: Context, event: Event) -> None:
        async def outside() -> JsonValue:
            return {"answer": 42}

        value = await ctx.record("oracle", outside)
        text = f"{await ctx.now()} {ctx.random.random()} {ctx.uuid()} {value}"
        ctx.emit(MessagePosted(content=text), to="nobody")
        ctx.emit(EpisodeFinished(answer=text))


def replaying(events: list[Event], journal: Journal, *, role: str = "sampler") -> Context:
    request = events[0].data
    assert isinstance(request, EpisodeRequested)
    return Context(
        role=role,
        source=f"{role}/again",
        event=events[0],
        history=History(events),
        request=request,
        world=None,
        journal=journal,
    )


async def test_clock_random_uuid_and_values_repeat_from_the_journal(bus: Bus) -> None:
    events = await run_episode(bus, request_episode(), Program(nodes=(Sampler(),)))
    assert [data.kind for data in of_kind(events, ValueRecorded)] == ["oracle", "clock"]
    journal = Journal(journals(events)["sampler", events[0].id])
    ctx = replaying(events, journal)
    await Sampler().handle(ctx, events[0])
    journal.check()
    assert ctx.take_unsaved() == []


async def test_random_differs_between_deliveries_and_seeds() -> None:
    first, second = request_episode().at(1), request_episode().at(2)
    draws = {
        replaying([first, second], Journal(), role=role).random.random() for role in ("a", "b")
    }
    assert len(draws) == 2


async def test_an_emission_beyond_the_record_is_a_divergence_even_when_swallowed(bus: Bus) -> None:
    events = await run_episode(bus, request_episode(), Program(nodes=(Sampler(),)))
    journal = Journal()
    ctx = replaying(events, journal)
    with pytest.raises(DivergenceError, match=r"which the record doesn't hold"):
        ctx.emit(MessagePosted(content="new"))
    with pytest.raises(DivergenceError, match=r"emitted message\.posted"):
        journal.check()


async def test_a_record_that_is_not_used_up_is_a_divergence(bus: Bus) -> None:
    events = await run_episode(bus, request_episode(), Program(nodes=(Sampler(),)))
    journal = Journal(journals(events)["sampler", events[0].id])
    with pytest.raises(DivergenceError, match="this time it did nothing more"):
        journal.check()


async def test_another_kind_of_value_is_a_divergence(bus: Bus) -> None:
    events = await run_episode(bus, request_episode(), Program(nodes=(Sampler(),)))
    ctx = replaying(events, Journal(journals(events)["sampler", events[0].id]))
    with pytest.raises(DivergenceError, match=r"value\.recorded"):
        await ctx.now()


async def test_nothing_may_follow_the_end(bus: Bus) -> None:
    class Talkative(Sampler):
        async def handle(self, ctx: Context, event: Event) -> None:
            ctx.emit(EpisodeFinished(answer="done"))
            ctx.emit(MessagePosted(content="one more thing"))

    events = await run_episode(bus, request_episode(), Program(nodes=(Talkative(),)))
    assert one(events, EpisodeFinished).answer == "done"
    assert of_kind(events, MessagePosted) == []
    assert events[-1].type == "episode.finished"


async def test_no_value_follows_the_end_and_none_is_made_of_what_a_replay_would_not_do(
    bus: Bus,
) -> None:
    class Nested(Sampler):
        async def handle(self, ctx: Context, event: Event) -> None:
            async def talk() -> JsonValue:
                ctx.emit(MessagePosted(content="inside"))
                return None

            async def look() -> JsonValue:
                return str(await ctx.now())

            for produce in (talk, look):
                with pytest.raises(
                    ValueError, match=r"inside ctx\.record: a replay makes no values"
                ):
                    await ctx.record("nested", produce)
            ctx.emit(EpisodeFinished(answer="done"))
            with pytest.raises(ValueError, match=r"asked for a value \(clock\) after episode"):
                await ctx.now()

    events = await run_episode(bus, request_episode(), Program(nodes=(Nested(),)))
    assert one(events, EpisodeFinished).answer == "done"
    assert len(of_kind(events, ValueRecorded)) == 2


async def test_a_value_is_live_what_it_is_ever_after(bus: Bus) -> None:
    """A handler may change its copy; what JSON has no number for is text."""

    class Changing(Sampler):
        async def handle(self, ctx: Context, event: Event) -> None:
            async def page() -> JsonValue:
                return [1.5, float("nan")]

            value = await ctx.record("page", page)
            assert isinstance(value, list)
            value.append(3)
            ctx.emit(EpisodeFinished(answer=str(value)))

    events = await run_episode(bus, request_episode(), Program(nodes=(Changing(),)))
    assert one(events, EpisodeFinished).answer == "[1.5, 'NaN', 3]"
    for _ in range(2):
        journal = Journal(journals(events)["sampler", events[0].id])
        await Changing().handle(replaying(events, journal), events[0])
        journal.check()


async def test_what_a_handler_does_to_its_event_is_done_to_no_log(bus: Bus) -> None:
    class Changing(Sampler):
        async def handle(self, ctx: Context, event: Event) -> None:
            assert isinstance(event.data, EpisodeRequested)
            event.data.task.data["hints"] = ["a"]
            ctx.task.data["answer"] = 7
            ctx.emit(EpisodeFinished(answer=str(event.data.task.data)))

    events = await run_episode(bus, request_episode(), Program(nodes=(Changing(),)))
    assert one(events, EpisodeFinished).answer == "{'hints': ['a']}"
    assert one(events, EpisodeRequested).task.data == {}


async def test_a_model_error_is_recorded_and_reaches_the_handler(bus: Bus) -> None:
    class Patient(Sampler):
        async def handle(self, ctx: Context, event: Event) -> None:
            with pytest.raises(ModelUnavailableError, match="engine is down"):
                await ctx.complete(ScriptedModel([ModelUnavailableError("engine is down")]))
            ctx.emit(EpisodeFinished(answer="noticed"))

    events = await run_episode(bus, request_episode(), Program(nodes=(Patient(),)))
    assert one(events, ModelFailed).error == "ModelUnavailableError"
    assert one(events, EpisodeFinished).answer == "noticed"


async def test_a_model_client_that_exits_is_a_model_error(bus: Bus) -> None:
    def reply(_: ModelRequest) -> Reply:
        sys.exit(3)

    program = Agent("solver", llm=ScriptedModel(reply)).program()
    events = await run_episode(bus, request_episode(), program)
    assert one(events, ModelFailed).message == "SystemExit: 3"


async def test_a_model_client_that_crashes_is_a_model_error(bus: Bus) -> None:
    program = Agent("solver", llm=ScriptedModel([KeyError("choices")])).program()
    events = await run_episode(bus, request_episode(), program)
    assert one(events, ModelFailed).message == "KeyError: 'choices'"
    assert one(events, EpisodeFinished).error == "solver: ModelError: KeyError: 'choices'"


async def test_an_agent_without_a_model_says_so(bus: Bus) -> None:
    events = await run_episode(bus, request_episode(), Agent("solver").program())
    assert "agent 'solver' has no model" in str(one(events, EpisodeFinished).error)
    assert of_kind(events, ModelRequested) == []


async def test_the_run_may_give_a_role_another_model(bus: Bus) -> None:
    policy = ScriptedModel("from the policy", name="policy")

    @asynccontextmanager
    async def connect(asked: ModelSpec | ChatModel) -> AsyncGenerator[ChatModel]:
        assert asked == ModelSpec(model="policy")
        yield policy

    requested = request_episode(models={"*": ModelSpec(model="policy")})
    program = Agent("solver", llm=ScriptedModel("its own")).program()
    owner = owner_of(bus, requested, program, connect=connect)
    assert (await owner.run()).answer == "from the policy"
    assert one(owner.events, ModelRequested).model == "policy"


async def test_later_prompts_hold_references_not_copies(bus: Bus) -> None:
    """What a turn adds to the log doesn't grow with the conversation."""
    calls = [ToolCall(id=f"c{n}", name="add", arguments={"a": n, "b": n}) for n in range(8)]
    program = Agent("solver", llm=ScriptedModel([*calls, "done"]), tools=[Adder()]).program()
    events = await run_episode(bus, request_episode(), program)
    first, *later = of_kind(events, ModelRequested)
    assert first.tools
    assert all(not request.tools and not request.preamble for request in later)
    sizes = {len(request.model_dump_json()) for request in later}
    assert max(sizes) - min(sizes) < 10


async def test_history_is_the_same_after_the_log_has_grown(bus: Bus) -> None:
    seen: dict[int, list[str]] = {}

    class Historian(Sampler):
        subscriptions = ("model.", "tool.")

        async def handle(self, ctx: Context, event: Event) -> None:
            ids = [e.id for e in ctx.history]
            assert seen.setdefault(event.seq, ids) == ids

    call = ToolCall(id="c1", name="add", arguments={"a": 1, "b": 2})
    agent = Agent("solver", llm=ScriptedModel([call, "done"]), tools=[Adder()]).program()
    events = await run_episode(
        bus, request_episode(), Program(nodes=(*agent.nodes, Historian()), tools=agent.tools)
    )
    assert len(seen) > 2
    for seq in list(seen):
        ctx = replaying(events, Journal())
        ctx.event = events[seq - 1]
        await Historian().handle(ctx, ctx.event)
