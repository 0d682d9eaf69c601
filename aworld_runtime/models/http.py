"""Connections to engines, and how often to ask again.

One pool per server and event loop is shared by all models that use the server, so that thousands of
episodes don't open thousands of pools. On httpx2, which the openai package brings: importing that
package itself costs 0.5 s of CPU, httpx2 0.06 s.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

import anyio
import httpx2
from anyio.lowlevel import RunVar

from aworld_runtime.errors import ModelTimeoutError, ModelUnavailableError

logger = logging.getLogger(__name__)

T = TypeVar("T")

CONNECT_S = 10.0
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
KEEP_ALIVE_S = 2.0
"""Shorter than any server's: uvicorn closes after 5 s, just when a client of 5 s may reuse."""
FIRST_WAIT_S = 0.25
LONGEST_WAIT_S = 8.0


@dataclass(slots=True)
class _Pool:
    client: httpx2.AsyncClient
    users: int = 0


_pools: RunVar[dict[str, _Pool]] = RunVar("model connection pools")


def new_client(url: str) -> httpx2.AsyncClient:
    """Connections to the server of `url`, without time limits of their own but for connecting.

    Proxies that the environment names are for other machines, and certificates, which take 30 ms to
    load, for https.
    """
    parts = urlsplit(url)
    return httpx2.AsyncClient(
        verify=parts.scheme == "https",
        trust_env=parts.hostname not in LOOPBACK,
        timeout=httpx2.Timeout(None, connect=CONNECT_S),
        limits=httpx2.Limits(max_keepalive_connections=64, keepalive_expiry=KEEP_ALIVE_S),
        follow_redirects=False,
    )


class Connections:
    """One model's share in the pool of its server. Usable in one event loop after another."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._origin = f"{parts.scheme}://{parts.netloc}"
        self._borrowed_from: dict[str, _Pool] | None = None

    def client(self) -> httpx2.AsyncClient:
        """The shared client of the running event loop."""
        pools = _pools_here()
        if self._borrowed_from is not pools:
            pools.setdefault(self._origin, _Pool(new_client(self._origin))).users += 1
            self._borrowed_from = pools
        return pools[self._origin].client

    async def aclose(self) -> None:
        """Give the share back; the last one closes the pool."""
        pools = _pools_here()
        if self._borrowed_from is pools:
            pool = pools[self._origin]
            pool.users -= 1
            if pool.users == 0:
                del pools[self._origin]
                await pool.client.aclose()
        self._borrowed_from = None


def _pools_here() -> dict[str, _Pool]:
    try:
        return _pools.get()
    except LookupError:
        pools: dict[str, _Pool] = {}
        _pools.set(pools)
        return pools


def shown(url: str) -> str:
    """`url` as errors may show it: without user, password and query."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = f":{parts.port}" if parts.port else ""
    return f"{parts.scheme}://{host}{port}{parts.path}"


class TryAgain(Exception):
    """An attempt failed in a way that may pass. `after`: seconds that the server asked to wait."""

    def __init__(self, reason: str, *, after: float | None = None, broken: bool = False) -> None:
        super().__init__(reason)
        self.after = after
        self.broken = broken
        """The connection failed, as a kept-alive one does that the server has closed."""


async def until_answered(
    attempt: Callable[[bool], Awaitable[T]],
    *,
    where: str,
    timeout_s: float,
    patience_s: float,
    first_wait_s: float = FIRST_WAIT_S,
    told: int = logging.WARNING,
) -> T:
    """Call `attempt` until it returns; it is told whether to use a fresh connection.

    A broken connection is tried once more at once, on a fresh one. After that, and for every other
    `TryAgain`, waits grow exponentially with jitter, or are what the server asked for. The log tells
    of the first wait and then ever more rarely, at level `told`.

    Raises:
        ModelTimeoutError: `timeout_s` have passed.
        ModelUnavailableError: it failed again and again for `patience_s`.
    """
    deadline = time.monotonic() + timeout_s
    give_up = deadline
    reason = ""
    failures = 0
    fresh = False
    with anyio.move_on_after(timeout_s):
        while True:
            try:
                return await attempt(fresh)
            except TryAgain as again:
                reason = str(again)
                failures += 1
                fresh = again.broken and failures == 1
                wait = again.after if again.after is not None else _backoff(failures, first_wait_s)
            if failures == 1:
                give_up = min(deadline, time.monotonic() + patience_s)
            if fresh:
                continue
            left = give_up - time.monotonic()
            if wait > left:
                raise ModelUnavailableError(f"{where}: {reason} (tried {failures} times)")
            if failures.bit_count() == 1:
                logger.log(
                    told,
                    "model at %s: %.200s; retrying in %.1f s (try %d, giving up in %.0f s)",
                    where,
                    reason,
                    wait,
                    failures + 1,
                    left,
                )
            await anyio.sleep(wait)
    after = f" (before that: {reason})" if reason else ""
    raise ModelTimeoutError(f"{where}: no answer within {timeout_s:.3g} s{after}")


def _backoff(failures: int, first_wait_s: float) -> float:
    longest = min(LONGEST_WAIT_S, first_wait_s * 2.0 ** min(failures - 1, 10))
    return longest * random.uniform(0.5, 1.0)


def retry_after(headers: httpx2.Headers) -> float | None:
    """Seconds that the server asks to wait; a date is not understood and counts as not asked."""
    try:
        return max(0.0, float(headers.get("retry-after", "")))
    except ValueError:
        return None
