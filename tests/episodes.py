"""Episodes without a worker: a program, an owner, and what its log holds afterwards."""
# ruff: noqa: ARG002 - nodes, tools and environments have given signatures

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import TypeVar

import anyio
from pydantic import JsonValue

from aworld_runtime import Agent, BaseTool, Swarm
from aworld_runtime.bus.base import Bus, read_all
from aworld_runtime.environments.base import Reward
from aworld_runtime.events import EpisodeRequested, Event, EventData, new_id
from aworld_runtime.messages import Message, ModelSpec, Task, ToolCall, ToolSpec
from aworld_runtime.models.base import ChatModel, ModelRequest
from aworld_runtime.models.scripted import Reply, ScriptedModel
from aworld_runtime.nodes.context import Connect
from aworld_runtime.nodes.node import Program
from aworld_runtime.nodes.owner import EpisodeOwner
from aworld_runtime.trajectory import Episode

Kind = TypeVar("Kind", bound=EventData)


class Adder(BaseTool):
    """Adds, and counts how often it really ran."""

    def __init__(self) -> None:
        self.ran: list[tuple[JsonValue, JsonValue]] = []

    def get_schema(self) -> ToolSpec:
        return ToolSpec(
            name="add",
            parameters={"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a", "b"]},
        )

    async def run(self, **arguments: JsonValue) -> JsonValue:
        a, b = arguments["a"], arguments["b"]
        self.ran.append((a, b))
        assert isinstance(a, int)
        assert isinstance(b, int)
        return a + b


class Gate(BaseTool):
    """Answers once it is opened."""

    def __init__(self, name: str = "gate") -> None:
        self.name = name
        self.reached = anyio.Event()
        self.open = anyio.Event()

    def get_schema(self) -> ToolSpec:
        return ToolSpec(name=self.name)

    async def run(self, **arguments: JsonValue) -> JsonValue:
        self.reached.set()
        await self.open.wait()
        return "open"


class ExactMatch:
    """An environment: reward 1 for the expected answer."""

    def tasks(self, split: str, *, count: int, seed: int = 0) -> Sequence[Task]:
        return ()

    async def score(self, task: Task, episode: Episode) -> Reward:
        right = float(episode.answer == task.data.get("expected"))
        return Reward(total=right, breakdown={"right": right})


EXACT_MATCH = "tests.episodes:ExactMatch"


def adding(request: ModelRequest) -> Reply:
    """Two sums at once, one wrong call, then the sum of what came back; a pure function of the conversation."""
    results = [m.content for m in request.messages if m.role == "tool"]
    if any("Answer of solver" in m.content for m in request.messages):
        return "checked: 100"
    match len(results):
        case 0:
            return [
                ToolCall(id="c1", name="add", arguments={"a": 10, "b": 20}),
                ToolCall(id="c2", name="add", arguments={"a": 30, "b": 40}),
                ToolCall(id="c3", name="divide", arguments={"a": 1}),
            ]
        case 3:
            first, second = (int(r) for r in results if r.isdigit())
            return ToolCall(id="c4", name="add", arguments={"a": first, "b": second})
        case _:
            return results[-1]


def adding_swarm(model: ChatModel, tool: BaseTool) -> Swarm:
    solver = Agent("solver", llm=model, tools=[tool], system_prompt="Add.")
    return Swarm(solver, Agent("verifier", llm=model, system_prompt="Check."))


def adding_program() -> tuple[Program, ScriptedModel, Adder]:
    model, tool = ScriptedModel(adding), Adder()
    return adding_swarm(model, tool).program(), model, tool


def request_episode(
    prompt: str = "Add it all.",
    *,
    environment: str | None = None,
    deadline: datetime | None = None,
    timeout_s: float | None = None,
    models: dict[str, ModelSpec] | None = None,
    **data: JsonValue,
) -> Event:
    return Event.of(
        EpisodeRequested(
            task=Task(id="t1", prompt=prompt, data=data, environment=environment),
            program="local:test",
            models=models or {},
            seed=7,
            timeout_s=timeout_s,
        ),
        source="test/1",
        run_id="r1",
        task_id="t1",
        episode_id=new_id(),
        trust="user",
        deadline=deadline,
    )


@asynccontextmanager
async def as_given(asked: ModelSpec | ChatModel) -> AsyncGenerator[ChatModel]:
    assert not isinstance(asked, ModelSpec), f"nobody should connect to {asked.model}"
    yield asked


def owner_of(
    bus: Bus,
    requested: Event,
    program: Program,
    *,
    worker: str = "w1",
    connect: Connect = as_given,
) -> EpisodeOwner:
    return EpisodeOwner(
        bus=bus, requested=requested, program=program, worker=worker, connect=connect
    )


async def run_episode(bus: Bus, requested: Event, program: Program) -> list[Event]:
    """Own an episode to its end; returns what is in its log."""
    owner = owner_of(bus, requested, program)
    await owner.run()
    return await read_all(bus, owner.log)


def of_kind(events: Sequence[Event], kind: type[Kind]) -> list[Kind]:
    return [event.data for event in events if isinstance(event.data, kind)]


def one(events: Sequence[Event], kind: type[Kind]) -> Kind:
    (found,) = of_kind(events, kind)
    return found


def last_message(request: ModelRequest) -> Message:
    return request.messages[-1]
