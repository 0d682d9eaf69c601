"""What the server says of a worker's claims."""

from __future__ import annotations

from pathlib import Path

import pytest

from aworld_runtime.bus import open_bus
from aworld_runtime.bus.redis.keys import Keys
from aworld_runtime.bus.server import PrivateServer
from aworld_runtime.chaos.claims import held_by
from aworld_runtime.events import Registry
from aworld_runtime.names import EPISODES_QUEUE
from tests.episodes import request_episode

pytestmark = pytest.mark.anyio


async def test_the_server_says_which_episodes_a_worker_holds(tmp_path: Path) -> None:
    registry, work = Registry(), Keys("aworld").queue(EPISODES_QUEUE).work
    requests = [request_episode() for _ in range(3)]
    async with PrivateServer(tmp_path / "server") as server, open_bus(server.url) as bus:
        await bus.put(EPISODES_QUEUE, *requests)
        async with (
            bus.consume(EPISODES_QUEUE, consumer="worker-1.2", credit=2) as one,
            bus.consume(EPISODES_QUEUE, consumer="worker-1", credit=1) as other,
        ):
            taken = [(await one.take()).event.episode_id for _ in range(2)]
            last = (await other.take()).event.episode_id
            assert {*await held_by("worker-1.2", server.url, work, registry)} == {*taken}
            assert await held_by("worker-1", server.url, work, registry) == [last]
            assert await held_by("worker-3", server.url, work, registry) == []
    assert await held_by("worker-1", server.url, work, registry) == []
