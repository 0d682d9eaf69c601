"""Programs that tests of replay name as `module:attribute`."""

import random

from aworld_runtime import Agent, Swarm
from aworld_runtime.events import EpisodeFinished, Event, MessagePosted
from aworld_runtime.models.scripted import ScriptedModel
from aworld_runtime.nodes.context import Context
from aworld_runtime.nodes.node import Program
from tests.episodes import Adder, adding, adding_swarm

swarm = adding_swarm(ScriptedModel(adding), Adder())


def changed_swarm() -> Swarm:
    """One word of the verifier's instructions differs."""
    model = ScriptedModel(adding)
    solver = Agent("solver", llm=model, tools=[Adder()], system_prompt="Add.")
    return Swarm(solver, Agent("verifier", llm=model, system_prompt="Verify."))


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
