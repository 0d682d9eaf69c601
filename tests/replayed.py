"""Programs that tests of replay name as `module:attribute`."""

import random

from aworld_runtime import Agent, Swarm
from aworld_runtime.events import EpisodeFinished, Event, MessagePosted
from aworld_runtime.messages import ToolCall
from aworld_runtime.models.base import ModelRequest
from aworld_runtime.models.scripted import Reply, ScriptedModel
from aworld_runtime.nodes.context import Context
from aworld_runtime.nodes.node import Program
from tests.episodes import Adder, adding, adding_swarm

swarm = adding_swarm(ScriptedModel(adding), Adder())


def changed_swarm() -> Swarm:
    """One word of the verifier's instructions differs."""
    model = ScriptedModel(adding)
    solver = Agent("solver", llm=model, tools=[Adder()], system_prompt="Add.")
    return Swarm(solver, Agent("verifier", llm=model, system_prompt="Verify."))


def summing(request: ModelRequest) -> Reply:
    """Adds twice and answers with the sum: what tools say is what it answers."""
    results = [m.content for m in request.messages if m.role == "tool"]
    if not results:
        return ToolCall(id="c1", name="add", arguments={"a": 1, "b": 2})
    if len(results) == 1:
        return ToolCall(id="c2", name="add", arguments={"a": int(results[0]), "b": 10})
    return results[-1]


def summing_agent(tool: Adder | None = None, *, prompt: str = "Add.") -> Agent:
    model = ScriptedModel(summing)
    return Agent("adder", llm=model, tools=[tool or Adder()], system_prompt=prompt)


class Dice:
    """Draws at random, past its context."""

    role = "dice"
    subscriptions = ("episode.requested",)

    async def handle(self, ctx: Context, event: Event) -> None:
        ctx.emit(MessagePosted(content=f"{event.type} begins"), to="nobody")
        ctx.emit(EpisodeFinished(answer=str(random.random())))

    def program(self) -> Program:
        return Program(nodes=(self,))


dice = Dice()
