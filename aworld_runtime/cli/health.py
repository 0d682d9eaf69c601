"""`/healthz` and `/metrics` of a process: a few lines of HTTP, for whoever has to know how it does."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from http import HTTPStatus

import anyio
from anyio import TASK_STATUS_IGNORED
from anyio.abc import SocketAttribute, SocketStream, TaskStatus
from anyio.from_thread import start_blocking_portal
from pydantic import JsonValue

from aworld_runtime import telemetry
from aworld_runtime.errors import ConfigError

JSON = "application/json"
REQUEST_S = 5.0
"""Seconds a client has to ask and to listen."""
LONGEST = 8 * 1024

Health = Callable[[], Mapping[str, JsonValue]]
"""What a process says of itself."""


async def serve_health(
    address: tuple[str, int],
    health: Health,
    *,
    task_status: TaskStatus[int] = TASK_STATUS_IGNORED,
) -> None:
    """Answer until cancelled; started once it listens, with its port.

    Raises:
        ConfigError: the port is taken.
    """
    host, port = address
    try:
        listener = await anyio.create_tcp_listener(local_host=host, local_port=port)
    except OSError as error:
        raise ConfigError(f"health at {host}:{port}: {error.strerror or error}") from error

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


@contextmanager
def health_beside(address: tuple[str, int], health: Health) -> Generator[int]:
    """The same from a thread of its own, for what is no event loop; gives the port. Raises as `serve_health` does."""
    with start_blocking_portal() as portal:
        serving, port = portal.start_task(serve_health, address, health)
        try:
            yield port
        finally:
            serving.cancel()


def metrics_answer() -> tuple[HTTPStatus, str, bytes]:
    """Status, content type and content of `/metrics`."""
    try:
        return HTTPStatus.OK, *telemetry.exposition()
    except ConfigError as error:
        return HTTPStatus.NOT_IMPLEMENTED, JSON, _error(str(error))


async def _request_line(stream: SocketStream) -> str:
    head = b""
    while b"\r\n\r\n" not in head and len(head) < LONGEST:
        head += await stream.receive()
    return head.partition(b"\r\n")[0].decode("latin-1")


def _answer(request: str, health: Health) -> bytes:
    method, _, rest = request.partition(" ")
    path = rest.partition(" ")[0].partition("?")[0]
    kind = JSON
    if method not in {"GET", "HEAD"}:
        status, content = HTTPStatus.METHOD_NOT_ALLOWED, _error("GET /healthz or /metrics")
    elif path == "/healthz":
        status, content = HTTPStatus.OK, json.dumps(health()).encode()
    elif path == "/metrics":
        status, kind, content = metrics_answer()
    else:
        status, content = HTTPStatus.NOT_FOUND, _error("GET /healthz or /metrics")
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (b"" if method == "HEAD" else content)


def _error(text: str) -> bytes:
    return json.dumps({"error": text}).encode()
