"""A worker's slots: what it takes it gives back, also what was taken from it."""

from __future__ import annotations

import anyio
import pytest

from aworld_runtime.agents import Agent
from aworld_runtime.bus import open_bus
from aworld_runtime.bus.base import read_all
from aworld_runtime.events import EpisodeFinished, EpisodeRequested, Event
from aworld_runtime.messages import Task
from aworld_runtime.models.scripted import ScriptedModel
from aworld_runtime.names import EPISODES_QUEUE, episode_log
from aworld_runtime.nodes.worker import Worker
from tests.waiting import wait_until

pytestmark = pytest.mark.anyio


def request(episode: str) -> Event:
    data = EpisodeRequested(task=Task(id="t", prompt="go"), program="local:slow")
    return Event.of(data, source="test", episode_id=episode)


async def test_an_episode_queued_twice_runs_once_and_costs_nobody_a_slot() -> None:
    slow = Agent("slow", llm=ScriptedModel(lambda _: "done", delay_s=0.1))
    async with open_bus("memory://") as bus, anyio.create_task_group() as tasks:
        for episode in ("twice", "twice", "other", "another"):
            await bus.put(EPISODES_QUEUE, request(episode))
        for name in ("w1", "w2"):
            worker = Worker(bus, name=name, slots=1, programs={"local:slow": slow})
            tasks.start_soon(worker.run)

        async def settled() -> bool:
            return await bus.backlog(EPISODES_QUEUE) == 0

        await wait_until(settled, description="an empty queue")
        for episode in ("twice", "other", "another"):
            log = await read_all(bus, episode_log(episode))
            assert [e.seq for e in log if isinstance(e.data, EpisodeFinished)] == [len(log)]
        tasks.cancel_scope.cancel()
