"""What a store keeps of a fork: what is its own."""

import pytest

from aworld_runtime import Runtime
from aworld_runtime.archive.logs import Logs
from aworld_runtime.bus.base import read_all
from aworld_runtime.names import episode_log
from aworld_runtime.store import open_store

pytestmark = pytest.mark.anyio

SWARM = "tests.replayed:swarm"


async def test_the_store_keeps_a_forks_own_events_alone(store_url: str) -> None:
    async with Runtime(bus="memory://", store=store_url) as runtime:
        parent = await runtime.run(SWARM, "Add.")
        log = await read_all(runtime.bus, episode_log(parent.id))
        fork = await runtime.fork(parent.id, at=30)
        await runtime.result(fork)
        whole = await Logs(runtime.bus, runtime.store).read_all(episode_log(fork))
    async with open_store(store_url) as opened:
        assert await opened.read(episode_log(fork)) == whole[30:]
        assert await opened.read(episode_log(parent.id)) == log
        assert await read_all(opened, episode_log(fork)) == whole
        record = await opened.episode(fork)
        assert record is not None
        assert (record.parent, record.program, record.status) == (parent.id, SWARM, "answered")
        assert record.group_id is None
