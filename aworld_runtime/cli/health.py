"""`/healthz` and `/metrics` of a process: a few lines of HTTP, for whoever has to know how it does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import anyio
from anyio import TASK_STATUS_IGNORED
from anyio.abc import SocketAttribute, SocketStream, TaskStatus
from pydantic import JsonValue

from aworld_runtime import telemetry
from aworld_runtime.errors import ConfigError

REQUEST_S = 5.0
"""Seconds a client has to ask and to listen."""
LONGEST = 8 * 1024


async def serve_health(
    address: tuple[str, int],
    health: Callable[[], Mapping[str, JsonValue]],
    *,
    task_status: TaskStatus[int] = TASK_STATUS_IGNORED,
) -> None:
    """Answer until cancelled; started once it listens, with its port. `health` is what it says of itself.

    Raises:
        ConfigError: the port is taken.
    """
    host, port = address
    try:
        listener = await anyio.create_tcp_listener(local_host=host, local_port=port)
    except OSError as error:
        raise ConfigError(f"--health {host}:{port}: {error.strerror or error}") from error

    async def answer(stream: SocketStream) -> None:
        async with stream:
            with anyio.move_on_after(REQUEST_S):
                try:
                    await stream.send(_answer(await _request_line(stream), health))
                except (anyio.BrokenResourceError, anyio.EndOfStream):
                    return  # it went away; there is nobody to tell

    async with listener:
        port = listener.extra(SocketAttribute.local_port)  # noqa: S610 - anyio's, not Django's
        task_status.started(port)
        await listener.serve(answer)


async def _request_line(stream: SocketStream) -> str:
    head = b""
    while b"\r\n\r\n" not in head and len(head) < LONGEST:
        head += await stream.receive()
    return head.partition(b"\r\n")[0].decode("latin-1")


def _answer(request: str, health: Callable[[], Mapping[str, JsonValue]]) -> bytes:
    method, _, rest = request.partition(" ")
    path = rest.partition(" ")[0].partition("?")[0]
    kind = "application/json"
    if method not in {"GET", "HEAD"}:
        status, content = "405 Method Not Allowed", _error("GET /healthz or /metrics")
    elif path == "/healthz":
        status, content = "200 OK", json.dumps(health()).encode()
    elif path == "/metrics":
        try:
            status, (kind, content) = "200 OK", telemetry.exposition()
        except ConfigError as error:
            status, content = "501 Not Implemented", _error(str(error))
    else:
        status, content = "404 Not Found", _error("GET /healthz or /metrics")
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (b"" if method == "HEAD" else content)


def _error(text: str) -> bytes:
    return json.dumps({"error": text}).encode()
