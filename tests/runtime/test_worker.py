"""A worker's slots: what it takes it gives back, also what was taken from it."""

from __future__ import annotations

import anyio
import pytest

from aworld_runtime.agents import Agent
from aworld_runtime.bus import open_bus
from aworld_runtime.bus.base import NodeInfo, read_all
from aworld_runtime.errors import WorkerRefusedError
from aworld_runtime.events import EpisodeFinished, EpisodeRequested, Event
from aworld_runtime.messages import Task
from aworld_runtime.models.scripted import ScriptedModel
from aworld_runtime.names import EPISODES_QUEUE, episode_log
from aworld_runtime.nodes.worker import Worker, check_version
from tests.waiting import wait_until

pytestmark = pytest.mark.anyio


def request(episode: str, code_version: str = "") -> Event:
    task = Task(id="t", prompt="go")
    data = EpisodeRequested(task=task, program="local:slow", code_version=code_version)
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


async def test_a_worker_of_other_code_leaves_an_episode_to_others() -> None:
    slow = {"local:slow": Agent("slow", llm=ScriptedModel("done"))}
    async with open_bus("memory://") as bus:
        await bus.put(EPISODES_QUEUE, request("e", code_version="2"))
        with pytest.raises(WorkerRefusedError, match="code version 1, the episode wants 2"):
            await Worker(bus, name="old", version="1", programs=slow).run()
        assert await bus.backlog(EPISODES_QUEUE) == 1
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(Worker(bus, name="new", version="2", programs=slow).run)

            async def ended() -> bool:
                log = await read_all(bus, episode_log("e"))
                return bool(log) and isinstance(log[-1].data, EpisodeFinished)

            await wait_until(ended, description="the episode's end")
            tasks.cancel_scope.cancel()
        finished = (await read_all(bus, episode_log("e")))[-1].data
        assert isinstance(finished, EpisodeFinished)
        assert finished.answer == "done"


async def test_a_worker_of_other_code_than_a_run_may_not_join() -> None:
    async with open_bus("memory://") as bus:
        await bus.announce(NodeInfo(name="trainer/r", kind="trainer", version="1"))
        with pytest.raises(WorkerRefusedError, match="trainer/r on this bus runs code version 1"):
            await check_version(bus, "2")
        # Resumed with other code; the trainer that died is still listed.
        await bus.announce(NodeInfo(name="launcher/r", kind="launcher", version="2"))
        await check_version(bus, "2")
        with pytest.raises(WorkerRefusedError, match="launcher/r on this bus runs code version 2"):
            await check_version(bus, "1")
