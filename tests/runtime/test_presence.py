"""Nodes that say they are here, and whoever learns of it."""

from contextlib import aclosing

import anyio

from aworld_runtime.bus.base import NodeInfo
from aworld_runtime.bus.open import open_bus
from aworld_runtime.bus.presence import announce, arrivals
from aworld_runtime.events import NodeJoined, NodeLeft


async def test_nodes_that_come_and_go_at_run_time_are_told_of() -> None:
    async with open_bus("memory://") as bus, aclosing(arrivals(bus, "worker")) as changes:
        nodes = [NodeInfo(name=f"{kind}/1", kind=kind) for kind in ("worker", "tool")]
        with anyio.fail_after(5):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lambda: announce(bus, lambda: nodes, who="test"))
                assert await anext(changes) == NodeJoined(node="worker/1", kind="worker")
                assert len(await bus.nodes()) == 2
                tasks.cancel_scope.cancel()
            left = await anext(changes)
        assert isinstance(left, NodeLeft)
        assert left.node == "worker/1"
        assert await bus.nodes() == []
