"""A tool worker: serves tools to episodes that run elsewhere on the bus.

    queue tool:NAME ──▶ take ──▶ run, up to `slots` at once ──▶ reply (mail to the episode) ──▶ ack

`drain` stops taking and lets the calls that run end.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from functools import partial

import anyio
from anyio.abc import TaskGroup
from pydantic import JsonValue

from aworld_runtime import telemetry
from aworld_runtime.bus.base import Bus, Consumer, Delivery, NodeInfo
from aworld_runtime.bus.presence import announce
from aworld_runtime.bus.room import when_there_is_room
from aworld_runtime.errors import EventError
from aworld_runtime.events import ToolCalled, utc_now
from aworld_runtime.names import tool_queue
from aworld_runtime.nodes.deliveries import bury, try_again
from aworld_runtime.nodes.tool_calls import answer_call
from aworld_runtime.tools.base import BaseTool


class ToolWorker:
    """Serves calls until drained or cancelled. A call is made again if its worker dies: tools see it at least once."""

    def __init__(
        self,
        bus: Bus,
        tools: Mapping[str, BaseTool],
        *,
        name: str,
        slots: int = 16,
        version: str = "",
    ) -> None:
        self._bus = bus
        self.name = name
        self._tools = tools
        self._slots = slots
        self._version = version
        self._running = dict.fromkeys(tools, 0)
        self._draining = anyio.Event()
        self._since = utc_now()

    async def run(self) -> None:
        """Serve calls until drained."""
        self._since = self._bus.now()
        async with anyio.create_task_group() as tasks:
            nodes, who = partial(map, self._node, self._tools), f"tool worker {self.name}"
            tasks.start_soon(partial(announce, self._bus, nodes, who=who))
            async with anyio.create_task_group() as serving:
                for tool in self._tools:
                    serving.start_soon(self._serve, tool)
                await self._draining.wait()  # also where it has no tools
            tasks.cancel_scope.cancel()

    @property
    def running(self) -> int:
        """Calls that it runs now."""
        return sum(self._running.values())

    @property
    def draining(self) -> bool:
        return self._draining.is_set()

    def drain(self) -> None:
        """Take no more calls; `run` returns once those it has are answered."""
        self._draining.set()

    def health(self) -> dict[str, JsonValue]:
        """What it says of itself when asked."""
        return {
            "status": "draining" if self.draining else "ok",
            "worker": self.name,
            "version": self._version,
            "running": self.running,
            "slots": 0,
        }

    def _node(self, tool: str) -> NodeInfo:
        return NodeInfo(
            name=f"{tool}/{self.name}",
            kind="tool",
            version=self._version,
            pid=os.getpid(),
            host=socket.gethostname(),
            load=self._running[tool] / self._slots,
            queues=(tool_queue(tool),),
            since=self._since,
        )

    async def _serve(self, tool: str) -> None:
        async with (
            self._bus.consume(tool_queue(tool), consumer=self.name, credit=self._slots) as consumer,
            anyio.create_task_group() as calls,
            anyio.create_task_group() as taking,
        ):
            taking.start_soon(self._take_all, consumer, tool, calls)
            await self._draining.wait()
            taking.cancel_scope.cancel()

    async def _take_all(self, consumer: Consumer, tool: str, calls: TaskGroup) -> None:
        while True:
            calls.start_soon(self._answer, await consumer.take(), tool)

    async def _answer(self, delivery: Delivery, tool: str) -> None:
        if not isinstance(delivery.event.data, ToolCalled):
            await bury(delivery, f"expected tool.called, got {delivery.event.type}")
            return
        event = delivery.event
        self._running[tool] += 1
        try:
            with telemetry.about(episode=event.episode_id, run=event.run_id, worker=self.name):
                answer = await answer_call(
                    event, self._tools[tool], source=f"{tool}/{self.name}", known=self._tools
                )
            reply = partial(self._bus.reply, event, answer)
            await when_there_is_room(reply, who=f"{tool}/{self.name}")
            await delivery.ack()
        except EventError as error:  # an answer that no log can hold
            await try_again(delivery, error)
        finally:
            self._running[tool] -= 1
