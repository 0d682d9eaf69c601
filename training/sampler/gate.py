"""The HTTP gate in front of every sampler: no completion mixes two versions of the policy.

                 ┌ sampling request ─ wait while closed ─▶ engine ─ headers: policy, version ─▶ reply
    ASGI request ┼ GET /policy
                 └ POST /publish ─ close ▶ abort ▶ wait until idle ▶ weights ▶ version ▶ open

An aborted request replies with what it has, finish reason `abort`, and the version that sampled it;
its client sends prompt and partial output again. New requests wait at the gate, so whatever passes
it runs under one version from its first token to its last.

Runs inside the engine's server, vLLM's or ours: standard library, anyio and ASGI only.
"""

from __future__ import annotations

import json
import logging
import os
from abc import abstractmethod
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any, Protocol

import anyio

if TYPE_CHECKING:
    from aworld_runtime.training.sampler.transfer import Rendezvous, TensorInfo

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

logger = logging.getLogger(__name__)

POLICY_HEADER = "x-policy"
VERSION_HEADER = "x-policy-version"
HOLD = "AWORLD_SAMPLER_HOLD"
"""Set in the server's environment, the one way into a middleware: sample nothing before the first publish."""
NO_VERSION = -1
"""What a server on hold says it serves."""
BUSY = 409
"""Status of a publish order while another is carried out."""
GONE = 410
"""Status of a publish order over a group that failed or was replaced."""
DRAIN_DEADLINE = 20.0
"""Seconds for aborted requests to send their replies."""
ABORT_INTERVAL = 0.25
"""Seconds between aborts while draining: a request may have been on its way into the engine."""


class Engine(Protocol):
    """What the gate needs of the engine behind it."""

    policy: str
    """The name of the policy it samples."""
    ranks: int
    """Its processes that receive weights."""

    async def abort(self) -> None:
        """Stop sampling; running requests end with their partial output."""
        ...

    async def load(self, rendezvous: Rendezvous, tensors: list[TensorInfo]) -> None:
        """Receive the weights, and forget all that was computed with the old ones."""
        ...

    async def resume(self) -> None:
        """Sample again."""
        ...


class PolicyGate:
    """ASGI middleware; a subclass says where the engine is."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._version = NO_VERSION if HOLD in os.environ else 0
        self._running = 0
        self._open = anyio.Event()
        self._open.set()
        self._idle = anyio.Event()
        self._broken: str | None = None
        self._group: Rendezvous | None = None
        self._left: list[Rendezvous | None] = []

    @abstractmethod
    def engine(self, scope: Scope) -> Engine:
        """The engine behind this server."""
        ...

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Route one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = (scope["method"], scope["path"])
        if request == ("GET", "/policy"):
            engine = self.engine(scope)
            state = {"policy": engine.policy, "version": self._version, "ranks": engine.ranks}
            await _reply(send, 200, state)
        elif request == ("POST", "/publish"):
            status, body = await self._publish(self.engine(scope), await _read(receive))
            await _reply(send, status, body)
        elif request == ("GET", "/health") and self._broken is not None:
            await _reply(send, 503, _error(self._broken))
        elif scope["method"] == "POST" and scope["path"].startswith("/v1/"):
            await self._sample(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _sample(self, scope: Scope, receive: Receive, send: Send) -> None:
        while not self._open.is_set():  # it may close again before this task runs
            await self._open.wait()
        if self._broken is not None or self._version == NO_VERSION:
            await _reply(send, 503, _error(self._broken or "waiting for the first weights"))
            return
        headers = [
            (POLICY_HEADER.encode(), self.engine(scope).policy.encode()),
            (VERSION_HEADER.encode(), str(self._version).encode()),
        ]

        async def stamped(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *headers]
            await send(message)

        self._running += 1
        try:
            await self._app(scope, receive, stamped)
        finally:
            self._running -= 1
            if self._running == 0:
                self._idle.set()

    async def _publish(self, engine: Engine, body: bytes) -> tuple[int, dict[str, Any]]:
        """Swap the weights; the status and body of the reply."""
        try:
            order = json.loads(body)
            version, rendezvous, tensors = order["version"], order["rendezvous"], order["tensors"]
        except (ValueError, KeyError, TypeError) as error:
            return 400, _error(f"not a publish order: {error!r}")
        if not self._open.is_set():
            return BUSY, _error("another publish is under way")
        if rendezvous != self._group:
            self._left.append(self._group)
            self._group = rendezvous
        if rendezvous in self._left:  # joining it again would wait for a trainer that is not there
            return GONE, _error("this weight group was left: open another")
        self._open = anyio.Event()
        try:
            if not await self._drain(engine):
                await engine.resume()
                return 503, _error(f"requests still run {DRAIN_DEADLINE} s after their abort")
            self._broken = "the last publish failed half way: publish again or start anew"
            await engine.load(rendezvous, tensors)
            await engine.resume()
            self._version = version
            self._broken = None
        except Exception as error:  # whatever the engine raises, its caller is told
            logger.exception("publish of version %s failed", version)
            self._left.append(rendezvous)
            return 500, _error(f"publish of version {version} failed: {error}")
        finally:
            self._open.set()
        return 200, {"policy": engine.policy, "version": version}

    async def _drain(self, engine: Engine) -> bool:
        with anyio.move_on_after(DRAIN_DEADLINE):
            while True:
                self._idle = anyio.Event()
                await engine.abort()
                if self._running == 0:
                    return True
                with anyio.move_on_after(ABORT_INTERVAL):
                    await self._idle.wait()
        return False


def _error(message: str) -> dict[str, Any]:
    """An error in the OpenAI shape."""
    return {"error": {"message": message, "type": "sampler_error"}}


async def _read(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return body


async def _reply(send: Send, status: int, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(content)).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
