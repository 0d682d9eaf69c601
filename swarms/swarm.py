"""A swarm: several agents and a topology."""

from __future__ import annotations

from collections.abc import Sequence

from aworld_runtime.agents.agent import Agent
from aworld_runtime.errors import ConfigError
from aworld_runtime.messages import Task
from aworld_runtime.nodes.environment import EnvironmentNode
from aworld_runtime.nodes.node import Program
from aworld_runtime.nodes.serial import Serial
from aworld_runtime.runtime import run_program, run_sync
from aworld_runtime.trajectory import Episode


class Swarm:
    """`Swarm(solver, verifier)`: each agent gets the task and the answer before; the last one's answer counts.

    Raises:
        ConfigError: no agents, something else than agents, or two with one name.
    """

    def __init__(self, *members: Agent, agents: Sequence[Agent] = ()) -> None:
        self.agents = (*members, *agents)
        for agent in self.agents:
            if not isinstance(agent, Agent):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigError(
                    f"a swarm is made of agents, Swarm(solver, verifier); this one was given {agent!r:.80}"
                )
        names = [agent.role for agent in self.agents]
        if not names:
            raise ConfigError("a swarm needs at least one agent: Swarm(solver, verifier)")
        if doubled := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(
                f"two agents of a swarm share the name {', '.join(doubled)}: names are roles, and unique"
            )

    def program(self) -> Program:
        tools = {agent.role: agent.tools for agent in self.agents}
        rules = Serial([agent.role for agent in self.agents])
        return Program(nodes=(*self.agents, rules, EnvironmentNode()), tools=tools)

    async def arun(self, task: str | Task) -> Episode:
        """Do one task on an embedded runtime (memory bus, SQLite store).

        Raises:
            AWorldError: the episode failed; its log says how.
        """
        return await run_program(self, task)

    def run(self, task: str | Task) -> Episode:
        """`arun`, for scripts; works in a notebook's running event loop too."""
        return run_sync(run_program, self, task)


class MultiAgentGroup(Swarm):
    """Another name users know a swarm by: `MultiAgentGroup(agents=[…]).run("…")`."""
