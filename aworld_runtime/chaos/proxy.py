"""A TCP proxy between clients and the bus server: the network, with its faults.

    client ◀──▶ proxy ◀──▶ server        control: a line with a `Mode` on a unix socket ─▶ "ok"

    pass             bytes go through
    cut              every connection is reset, new ones too
    delay            each chunk is late, by a different time in each direction
    mute_requests    connections stay open; what clients send vanishes
    mute_replies     connections stay open; requests arrive, replies vanish

What vanished is never made up for: back in `pass`, connections that lost bytes are reset, as a peer does that hears of
a connection it no longer knows. Run as a program: `python -m aworld_runtime.chaos.proxy LISTEN_PORT SERVER_PORT SOCKET`.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import sys
from collections import deque
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import cast

import anyio

from aworld_runtime.processes import HOST

LATE_S = (0.02, 0.4)
"""Bounds of a chunk's delay."""
CLOCK_S = 0.001
"""A timer may fire so much early."""
DEADLINE_S = 5.0
"""For the proxy to do what it is told."""


class Mode(StrEnum):
    """What the network is like."""

    PASS = "pass"  # noqa: S105 - no password
    CUT = "cut"
    DELAY = "delay"
    MUTE_REQUESTS = "mute_requests"
    MUTE_REPLIES = "mute_replies"


class Proxy:
    """All connections, and the mode they are in."""

    def __init__(self, server_port: int) -> None:
        self.mode = Mode.PASS
        self.server_port = server_port
        self._pairs: set[_Pair] = set()

    async def serve(self, port: int, control: Path) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(lambda: _Pair(self).client, HOST, port)
        controller = await asyncio.start_unix_server(self._obey, control)
        async with listener, controller:
            await listener.serve_forever()

    def switch(self, mode: Mode) -> None:
        """From now on the network is like this."""
        self.mode = mode
        for pair in list(self._pairs):
            if mode is Mode.CUT or (mode is Mode.PASS and pair.lost_bytes):
                pair.reset()

    def add(self, pair: _Pair) -> None:
        self._pairs.add(pair)

    def discard(self, pair: _Pair) -> None:
        self._pairs.discard(pair)

    async def _obey(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        self.switch(Mode(line.decode().strip()))
        writer.write(b"ok\n")
        await writer.drain()
        writer.close()


class _Pair:
    """One client's connection and the one to the server that stands for it."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self.lost_bytes = False
        self.client = _End(self, Mode.MUTE_REQUESTS)
        self.server = _End(self, Mode.MUTE_REPLIES)
        self.client.other, self.server.other = self.server, self.client
        self._connecting: asyncio.Task[None] | None = None

    def opened(self, end: _End) -> None:
        if end is self.server:
            return
        self.proxy.add(self)
        if self.proxy.mode is Mode.CUT:
            self.reset()
            return
        # The pair holds the task; it ends with the connect.
        self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.create_connection(lambda: self.server, HOST, self.proxy.server_port)
        except OSError:
            self.reset()

    def closed(self, end: _End) -> None:
        """One side is gone. In a network that tells nothing, the other one doesn't hear of it."""
        self.proxy.discard(self)
        end.other.close_after_what_is_due()

    def reset(self) -> None:
        self.proxy.discard(self)
        self.client.reset()
        self.server.reset()


class _End(asyncio.Protocol):
    """One of the two connections: what comes in here goes out at the other."""

    def __init__(self, pair: _Pair, mute: Mode) -> None:
        self.other: _End = self
        self._pair = pair
        self._mute = mute
        self._transport: asyncio.Transport | None = None
        self._early: list[bytes] = []
        """Came before the connection was there."""
        self._late: deque[tuple[float, bytes]] = deque()
        """When to send on, and what."""
        self._closing = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        opened = self._transport = cast("asyncio.Transport", transport)
        self._pair.opened(self)
        for chunk in self._early:
            opened.write(chunk)
        self._early.clear()
        if self._closing:
            opened.close()

    def data_received(self, data: bytes) -> None:
        mode = self._pair.proxy.mode
        if mode is self._mute:
            self._pair.lost_bytes = True
            return
        loop = asyncio.get_running_loop()
        due = loop.time() + (random.uniform(*LATE_S) if mode is Mode.DELAY else 0.0)
        if mode is Mode.DELAY or self._late:
            # A queue of their own: timers for the same moment fire in any order.
            self._late.append((max(due, self._late[-1][0] if self._late else due), data))
            loop.call_at(self._late[-1][0], self._send_due)
        else:
            self.other.write(data)

    def _send_due(self) -> None:
        now = asyncio.get_running_loop().time() + CLOCK_S
        while self._late and self._late[0][0] <= now:
            self.other.write(self._late.popleft()[1])

    def pause_writing(self) -> None:
        self.other.read_on(False)

    def resume_writing(self) -> None:
        self.other.read_on(True)

    def read_on(self, reading: bool) -> None:
        """Whether to take what comes in; not where it can't be sent on."""
        if self._transport is not None and not self._transport.is_closing():
            (self._transport.resume_reading if reading else self._transport.pause_reading)()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's signature
        self._transport = None
        self._pair.closed(self)

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)
        elif self._transport is None:
            self._early.append(data)

    def close_after_what_is_due(self) -> None:
        self._closing = True
        if self._transport is not None:
            self._transport.close()

    def reset(self) -> None:
        self._closing = True
        if self._transport is not None:
            wire = cast("socket.socket", self._transport.get_extra_info("socket"))
            with suppress(OSError):  # the other side was faster
                wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()


async def tell(control: Path, mode: Mode) -> None:
    """Switch the proxy that listens at `control`."""
    with anyio.fail_after(DEADLINE_S):
        async with await anyio.connect_unix(control) as stream:
            await stream.send(f"{mode}\n".encode())
            await stream.receive()


if __name__ == "__main__":
    asyncio.run(Proxy(int(sys.argv[2])).serve(int(sys.argv[1]), Path(sys.argv[3])))
