"""One call to run whatever can be run."""

from __future__ import annotations

from aworld_runtime.messages import Task
from aworld_runtime.nodes.node import Runnable
from aworld_runtime.runtime import run_program, run_sync
from aworld_runtime.trajectory import Episode


class Runners:
    """`Runners.sync_run(input="…", agent=agent)`, and its async twin `Runners.run`."""

    @staticmethod
    def sync_run(input: str | Task, agent: Runnable) -> Episode:  # noqa: A002 - the name users write
        return run_sync(run_program, agent, input)

    @staticmethod
    async def run(input: str | Task, agent: Runnable) -> Episode:  # noqa: A002
        return await run_program(agent, input)
