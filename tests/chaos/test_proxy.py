"""The network's faults, between a client and a server that answers what it is sent."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path

import anyio
import pytest
from anyio.abc import SocketStream

from aworld_runtime.chaos.proxy import Mode, Proxy, tell
from aworld_runtime.processes import HOST, free_port
from tests.waiting import wait_until

pytestmark = pytest.mark.anyio
QUIET_S = 0.1


@pytest.fixture
async def proxy(tmp_path: Path) -> AsyncGenerator[tuple[int, Path, list[bytes]]]:
    """Its port, where it is told what to do, and what the server received."""
    port, server_port, received = free_port(), free_port(), list[bytes]()

    async def echo(stream: SocketStream) -> None:
        with suppress(anyio.BrokenResourceError):
            async with stream:
                async for chunk in stream:
                    received.append(chunk)
                    await stream.send(chunk)

    listener = await anyio.create_tcp_listener(local_host=HOST, local_port=server_port)
    control = tmp_path / "control"
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, echo)
        tasks.start_soon(Proxy(server_port).serve, port, control)
        await wait_until(control.exists)
        yield port, control, received
        tasks.cancel_scope.cancel()


async def test_bytes_pass(proxy: tuple[int, Path, list[bytes]]) -> None:
    async with await anyio.connect_tcp(HOST, proxy[0]) as client:
        await client.send(b"one")
        assert await client.receive() == b"one"


async def test_a_cut_resets_connections_old_and_new(proxy: tuple[int, Path, list[bytes]]) -> None:
    port, control, _ = proxy
    async with await anyio.connect_tcp(HOST, port) as old:
        await old.send(b"one")
        await old.receive()
        await tell(control, Mode.CUT)
        with pytest.raises((anyio.BrokenResourceError, anyio.EndOfStream)):
            await old.receive()
    async with await anyio.connect_tcp(HOST, port) as new:
        with pytest.raises((anyio.BrokenResourceError, anyio.EndOfStream)):
            await new.receive()


async def test_late_bytes_keep_their_order(proxy: tuple[int, Path, list[bytes]]) -> None:
    port, control, _ = proxy
    await tell(control, Mode.DELAY)
    async with await anyio.connect_tcp(HOST, port) as client:
        for number in range(5):
            await client.send(b"%d" % number)
            await anyio.sleep(0.01)
        came = b""
        while len(came) < 5:
            came += await client.receive()
    assert came == b"01234"


@pytest.mark.parametrize("mode", [Mode.MUTE_REQUESTS, Mode.MUTE_REPLIES])
async def test_a_half_open_connection_is_silent_and_later_reset(
    proxy: tuple[int, Path, list[bytes]], mode: Mode
) -> None:
    port, control, received = proxy
    async with await anyio.connect_tcp(HOST, port) as client:
        await client.send(b"one")
        await client.receive()
        await tell(control, mode)
        await client.send(b"two")
        with anyio.move_on_after(QUIET_S) as silence:
            await client.receive()
        assert silence.cancelled_caught
        assert (b"two" in received) == (mode is Mode.MUTE_REPLIES)
        await tell(control, Mode.PASS)
        with pytest.raises((anyio.BrokenResourceError, anyio.EndOfStream)):
            await client.receive()
