"""A local HTTP server that answers what a test says: an inference engine for tests."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
from anyio.abc import SocketAttribute, SocketStream


@dataclass(frozen=True)
class Answer:
    """An HTTP answer. `drop` closes the connection instead; `then_close` after it, unannounced."""

    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict[str, str])
    drop: bool = False
    then_close: bool = False
    delay_s: float = 0.0


@dataclass(frozen=True)
class Request:
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class Engine:
    """The running server: its address, and what it was asked."""

    url: str = ""
    requests: list[Request] = field(default_factory=list[Request])
    connections: int = 0


@asynccontextmanager
async def engine(answer: Callable[[Request], Answer]) -> AsyncGenerator[Engine]:
    """Serve on a free port while the context lasts."""
    state = Engine()

    async def serve(stream: SocketStream) -> None:
        state.connections += 1
        async with stream:
            buffer = b""
            try:
                while True:
                    while b"\r\n\r\n" not in buffer:
                        buffer += await stream.receive()
                    head, _, buffer = buffer.partition(b"\r\n\r\n")
                    first, *lines = head.decode().split("\r\n")
                    headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
                    length = int(headers.get("content-length", "0"))
                    while len(buffer) < length:
                        buffer += await stream.receive()
                    body, buffer = buffer[:length], buffer[length:]
                    request = Request(first.split()[1], headers, json.loads(body))
                    state.requests.append(request)
                    reply = answer(request)
                    await anyio.sleep(reply.delay_s)
                    if reply.drop:
                        return
                    await stream.send(_encode(reply))
                    if reply.then_close:
                        return
            except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
                return

    async with (
        await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
        anyio.create_task_group() as group,
    ):
        port = listener.extra(SocketAttribute.local_port)  # noqa: S610 - Django's has this name too
        state.url = f"http://127.0.0.1:{port}/v1"
        group.start_soon(listener.serve, serve)
        yield state
        group.cancel_scope.cancel()


def _encode(reply: Answer) -> bytes:
    text = reply.body if isinstance(reply.body, str) else json.dumps(reply.body)
    kind = "text/html" if isinstance(reply.body, str) else "application/json"
    lines = [f"HTTP/1.1 {reply.status} X", f"content-type: {kind}"]
    lines += [f"{name}: {value}" for name, value in reply.headers.items()]
    body = text.encode()
    lines += [f"content-length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode() + body
