"""Offline: what a handler reaches for past its context is refused, counted and a difference; nobody else is stopped."""

import asyncio
import socket
import subprocess
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream

from aworld_runtime import LLMClient
from aworld_runtime.bus.open import open_bus
from aworld_runtime.errors import LiveCallError
from aworld_runtime.events import EpisodeFinished, Event
from aworld_runtime.messages import Message
from aworld_runtime.models.base import ChatModel, ModelRequest
from aworld_runtime.models.scripted import ScriptedModel
from aworld_runtime.nodes.context import Context
from aworld_runtime.nodes.node import Program
from aworld_runtime.offline import offline
from aworld_runtime.replay.replay import ReplayReport, replay
from tests.episodes import request_episode, run_episode

REQUEST = ModelRequest(messages=(Message(role="user", content="hi"),))
Reach = Callable[[int], Awaitable[object]]


class Server:
    """Counts who connects."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.connected = 0

    async def serve(self, stream: SocketStream) -> None:
        self.connected += 1
        await stream.aclose()


@asynccontextmanager
async def a_server() -> AsyncGenerator[Server]:
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(SocketAttribute.local_port)  # noqa: S610 - no Django
    server = Server(port)
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, server.serve)
        yield server
        tasks.cancel_scope.cancel()


class Reaching:
    """A node that goes past its context, or by it."""

    role = "reaching"
    subscriptions = ("episode.requested",)

    def __init__(self, reach: Reach, port: int, *, by_context: bool = False) -> None:
        self._reach = reach
        self._port = port
        self._by_context = by_context

    async def handle(self, ctx: Context, event: Event) -> None:
        async def reach() -> None:
            await self._reach(self._port)

        await (ctx.record("reached", reach) if self._by_context else reach())
        ctx.emit(EpisodeFinished(answer=event.type))

    def program(self) -> Program:
        return Program(nodes=(self,))


async def replayed(node: Reaching) -> ReplayReport:
    async with open_bus("memory://") as bus:
        events = await run_episode(bus, request_episode(), node.program())
    return await replay(events, node.program())


async def by_asyncio(port: int) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.close()


async def by_name(port: int) -> None:
    _, writer = await asyncio.open_connection("localhost", port)
    writer.close()


async def by_anyio(port: int) -> None:
    await (await anyio.connect_tcp("127.0.0.1", port)).aclose()


async def in_a_thread(port: int) -> None:
    await asyncio.to_thread(_connect, port)


async def in_the_loops_pool(port: int) -> None:
    await asyncio.get_running_loop().run_in_executor(None, _connect, port)


async def in_spite_of_errors(port: int) -> None:
    with suppress(Exception):
        _connect(port)


def _connect(port: int) -> None:
    socket.create_connection(("127.0.0.1", port)).close()


async def by_a_process(_: int) -> None:
    await anyio.run_process(["true"])


async def by_a_blocking_process(_: int) -> None:
    subprocess.run(["true"], check=True)  # noqa: ASYNC221 - this is what is tested


@pytest.mark.parametrize(
    "reach, what",
    [
        (by_asyncio, "socket.connect ('127.0.0.1',"),
        (by_name, "socket.getaddrinfo 'localhost'"),
        (by_anyio, "socket.connect ('127.0.0.1',"),
        (in_a_thread, "socket.getaddrinfo '127.0.0.1'"),
        (in_the_loops_pool, "socket.getaddrinfo '127.0.0.1'"),
        (in_spite_of_errors, "socket.getaddrinfo '127.0.0.1'"),
        (by_a_process, "subprocess.Popen 'true'"),
        (by_a_blocking_process, "subprocess.Popen 'true'"),
    ],
)
async def test_what_a_handler_reaches_past_its_context_is_refused_and_counted(
    reach: Reach, what: str
) -> None:
    async with a_server() as server:
        node = Reaching(reach, server.port)
        report = await replayed(node)
        await anyio.wait_all_tasks_blocked()
        assert server.connected == (0 if "true" in what else 1)  # as it was recorded
    assert (report.identical, report.live_calls) == (False, 1)
    assert report.divergence is not None
    assert report.divergence.cause == "live call"
    assert report.divergence.replayed.startswith(what)
    assert "ctx.complete(model) or await ctx.record" in report.divergence.advice[-1]


async def test_the_line_that_calls_is_named() -> None:
    async with a_server() as server:
        for reach in (by_asyncio, by_name):
            report = await replayed(Reaching(reach, server.port))
            assert report.divergence is not None
            line = reach.__code__.co_firstlineno + 1
            assert f"test_offline.py:{line}" in report.divergence.advice[0]


@pytest.mark.parametrize("model", [ScriptedModel("hi", repeat_last=True), LLMClient("openai/x")])
async def test_a_model_that_is_asked_past_the_context_refuses(model: ChatModel) -> None:
    async def ask(_: int) -> None:
        with suppress(Exception):  # without a key
            await model.complete(REQUEST)

    report = await replayed(Reaching(ask, 0))
    assert (report.identical, report.live_calls) == (False, 1)
    assert report.divergence is not None
    assert report.divergence.replayed == f"model {model.name}"


async def test_what_the_context_recorded_is_not_reached_again() -> None:
    async with a_server() as server:
        report = await replayed(Reaching(by_asyncio, server.port, by_context=True))
    assert (report.identical, report.live_calls) == (True, 0)
    assert server.connected == 1


async def test_only_who_is_offline_is_refused() -> None:
    async with a_server() as server, anyio.create_task_group() as tasks:
        refused, reached = anyio.Event(), anyio.Event()

        async def another() -> None:
            await refused.wait()
            for reach in (by_asyncio, by_name, in_a_thread, in_the_loops_pool):
                await reach(server.port)
            reached.set()

        tasks.start_soon(another)
        with offline() as tried:
            with pytest.raises(LiveCallError, match=r"a replay makes no live call, and this is"):
                await by_asyncio(server.port)
            refused.set()
            with anyio.fail_after(10):
                await reached.wait()
            assert [call.what for call in tried] == [f"socket.connect ('127.0.0.1', {server.port})"]
        await by_asyncio(server.port)
        await anyio.wait_all_tasks_blocked()
    assert server.connected == 5
