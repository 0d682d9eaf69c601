"""The likely cause of a difference: each kind of change stops at the right event and is named."""
# ruff: noqa: ARG002 - nodes have a given signature

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from aworld_runtime import Agent, Swarm
from aworld_runtime.bus.open import open_bus
from aworld_runtime.events import EpisodeFinished, Event, EventData, MessagePosted, ModelRequested
from aworld_runtime.messages import Completion
from aworld_runtime.models.scripted import ScriptedModel
from aworld_runtime.nodes.context import Context
from aworld_runtime.nodes.node import Program, Runnable
from aworld_runtime.nodes.serial import Serial
from aworld_runtime.replay.replay import Divergence, replay
from aworld_runtime.version import code_version
from tests.episodes import request_episode, run_episode


async def first_difference(
    recorded: Runnable, replayed: Runnable
) -> tuple[list[Event], Divergence]:
    async with open_bus("memory://") as bus:
        events = await run_episode(bus, request_episode(), recorded.program())
    report = await replay(events, replayed.program())
    assert report.divergence is not None
    found = report.divergence
    assert found.type == events[found.seq - 1].type
    return events, found


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def multiply(a: int, b: int) -> int:
    return a * b


def team(
    prompt: str = "Solve it, and say how.",
    tools: Sequence[Callable[..., object]] = (add, multiply),
    model: str = "small",
) -> Swarm:
    """A solver, and one that checks its answer."""
    llm = ScriptedModel("5", name=model)
    solver = Agent("solver", llm=llm, system_prompt=prompt, tools=tools)
    return Swarm(solver, Agent("checker", llm=ScriptedModel("5"), system_prompt="Check."))


def wider() -> Callable[..., object]:
    def add(a: int, b: float) -> int:
        """Add two numbers."""
        return int(a + b)

    return add


@pytest.mark.parametrize(
    "changes, cause, advice",
    [
        (
            {"prompt": "Solve it, then say how."},
            "changed prompt",
            'message 1 (system), word 3: "and" is now "then"',
        ),
        (
            {"prompt": "Solve it, and say how. Briefly!"},
            "changed prompt",
            'message 1 (system), word 6: "Briefly!" is new',
        ),
        ({"prompt": ""}, "changed prompt", 'message 1 (system), is gone: "Solve it, and'),
        (
            {"tools": [multiply, add]},
            "reordered tools",
            "tools add, multiply come as multiply, add",
        ),
        ({"tools": [multiply]}, "changed tools", "tool add is gone"),
        (
            {"tools": [wider(), multiply]},
            "changed tools",
            'tool add, parameters.properties.b.type: "integer" is now "number"',
        ),
        (
            {"model": "large"},
            "changed model settings",
            'model: "small" is now "large"',
        ),
    ],
)
async def test_a_change_of_what_the_model_is_asked(
    changes: dict[str, Any], cause: str, advice: str
) -> None:
    events, found = await first_difference(team(), team(**changes))
    first = next(e for e in events if isinstance(e.data, ModelRequested))
    assert (found.seq, found.role, found.cause) == (first.seq, "solver", cause)
    assert advice in " ".join(found.advice)


class Warm(Agent):
    """Asks with a temperature."""

    def __init__(self, temperature: float) -> None:
        super().__init__("warm", llm=ScriptedModel("5"))
        self.temperature = temperature

    async def handle(self, ctx: Context, event: Event) -> None:
        completion: Completion = await ctx.complete(self.llm, temperature=self.temperature)
        ctx.emit(EpisodeFinished(answer=completion.text))


async def test_a_model_setting() -> None:
    _, found = await first_difference(Warm(0.2), Warm(0.7))
    assert (found.type, found.cause) == ("model.requested", "changed model settings")
    assert "temperature: 0.2 is now 0.7" in " ".join(found.advice)


class Strange:
    """Uses in its own way what a replay can't repeat."""

    role = "strange"
    subscriptions = ("episode.requested",)

    def __init__(self, how: str) -> None:
        self.how = how
        self.calls = 0

    async def handle(self, ctx: Context, event: Event) -> None:
        ctx.emit(MessagePosted(content="first"), to="nobody")
        self.calls += 1
        match self.how:
            case "random":
                answer = str(random.random())
            case "branch":
                answer = "heads" if random.random() < 0.5 else "tails"
            case "clock":
                answer = str(time.time())
            case "state":
                answer = str(self.calls)
            case _:
                answer = self.how
        ctx.emit(EpisodeFinished(answer=answer))

    def program(self) -> Program:
        return Program(nodes=(self,))


class StrangeAgent(Agent):
    async def handle(self, ctx: Context, event: Event) -> None:
        self.preamble = ()
        await super().handle(ctx, event)
        ctx.emit(MessagePosted(content=str(random.random())), to="nobody")


class StrangeSwarm(Serial):
    async def handle(self, ctx: Context, event: Event) -> None:
        for data, _ in self.decide(ctx.task, event):
            ctx.emit(data, to=f"nobody{random.random()}")


@pytest.mark.parametrize(
    "how, line", [("random", "random.random()"), ("clock", "time.time()"), ("state", "")]
)
async def test_what_differs_from_run_to_run_in_a_node(how: str, line: str) -> None:
    program = Strange(how)
    events, found = await first_difference(program, program)
    assert found.seq == seq_of(events, EpisodeFinished)
    assert found.cause == "non-determinism"
    here = "tests/runtime/test_cause.py:"
    assert here in " ".join(found.advice)
    assert line in " ".join(found.advice)


async def test_what_differs_from_run_to_run_in_an_agent() -> None:
    program = StrangeAgent("solver", llm=ScriptedModel("5"))
    events, found = await first_difference(program, program)
    assert found.seq == next(
        e.seq for e in events if e.role == "solver" and e.type == "message.posted"
    )
    assert found.cause == "non-determinism"


async def test_what_differs_from_run_to_run_in_a_swarms_rules() -> None:
    class Team:
        def program(self) -> Program:
            return Program(nodes=(StrangeSwarm(["solver"]),))

    events, found = await first_difference(Team(), Team())
    assert (found.role, found.seq) == ("swarm", seq_of(events, MessagePosted))
    assert found.cause == "non-determinism"
    assert "random random.random()" in " ".join(found.advice)


async def test_a_coin_that_is_tossed_is_no_change_of_code() -> None:
    program = Strange("branch")
    async with open_bus("memory://") as bus:
        events = await run_episode(bus, request_episode(), program.program())
    for _ in range(64):  # until one differs
        if (found := (await replay(events, program.program())).divergence) is not None:
            assert found.cause == "non-determinism"
            return
    raise AssertionError("it never differed")


async def test_a_changed_branch_in_the_code() -> None:
    events, found = await first_difference(Strange("left"), Strange("right"))
    assert (found.seq, found.cause) == (seq_of(events, EpisodeFinished), "changed code")
    assert 'data.answer: "left" is now "right"' in " ".join(found.advice)
    assert f"aworld-rt unknown recorded it, this is {code_version()}" in " ".join(found.advice)
    assert "tests.runtime.test_cause.Strange (tests/runtime/test_cause.py:" in " ".join(
        found.advice
    )


async def test_of_long_texts_the_word_that_differs() -> None:
    long = " ".join(f"word{n}" for n in range(100))
    _, found = await first_difference(Strange(long), Strange(long.replace("word77", "other")))
    assert found.advice[0] == 'data.answer, word 78: "word77" is now "other"'


async def test_another_program() -> None:
    _, found = await first_difference(Strange("left"), team())
    assert found.cause == "changed code"
    assert found.advice == ("give the program that was recorded: local:test",)


def seq_of(events: list[Event], kind: type[EventData]) -> int:
    return next(e.seq for e in events if isinstance(e.data, kind))
