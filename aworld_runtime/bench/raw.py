"""The server beside the bus: what it says about itself, and redis-py alone as the yardstick.

The only file here that knows redis-py; it is used as its documentation shows, with its defaults.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeAlias, cast

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from aworld_runtime.bus.redis.wire import Address
from aworld_runtime.events import Event, Registry

GROUP = "bench"
BLOCK_MS = 1000
COUNT = 100

Entries: TypeAlias = list[tuple[bytes, dict[bytes, bytes]]]


class RawServer:
    """A Redis or Valkey server, past the bus. Made by `raw_server`."""

    def __init__(self, url: str, client: Redis, namespace: str) -> None:
        self.namespace = namespace
        self._url = url
        self._client = client

    async def facts(self) -> dict[str, Any]:
        """All that INFO says."""
        return await self._client.info("all")

    async def name(self) -> str:
        """`valkey 9.1.2`."""
        facts = await self.facts()
        kind = facts.get("server_name", "redis")
        return f"{kind} {facts.get(f'{kind}_version') or facts['redis_version']}"

    async def cpu_s(self) -> float:
        """User and system time of all its threads, and of children that have ended."""
        facts = await self._client.info("cpu")
        names = ("used_cpu_user", "used_cpu_sys", "used_cpu_user_children", "used_cpu_sys_children")
        return sum(float(facts[name]) for name in names)

    async def memory(self) -> int:
        """Bytes that its allocator has given out."""
        return int((await self._client.info("memory"))["used_memory"])

    @asynccontextmanager
    async def transport(self) -> AsyncGenerator[RawTransport]:
        """For the latency phase."""
        async with Redis.from_url(self._url) as sender:
            yield RawTransport(self._url, sender, self.namespace)

    async def clean(self) -> None:
        """Delete every key of the benchmark."""
        async for keys in self._pages():
            await self._client.unlink(*keys)

    async def _pages(self) -> AsyncGenerator[list[bytes]]:
        page: list[bytes] = []
        client = cast("Any", self._client)
        keys = client.scan_iter(match=f"{self.namespace}:*", count=1000)
        async for key in cast("AsyncIterator[bytes]", keys):
            page.append(key)
            if len(page) >= COUNT:
                yield page
                page = []
        if page:
            yield page


@asynccontextmanager
async def raw_server(url: str) -> AsyncGenerator[RawServer]:
    """The server of a bus URL; the benchmark's own keys are gone from it afterwards."""
    address = Address.parse(url)
    async with Redis.from_url(address.server_url) as client:
        server = RawServer(address.server_url, client, address.namespace)
        try:
            yield server
        finally:
            await server.clean()


class RawTransport:
    """XADD and XREADGROUP BLOCK, a stream for each role; bodies are encoded and decoded as the bus does."""

    def __init__(self, url: str, sender: Redis, namespace: str) -> None:
        self._url = url
        self._sender = sender
        self._namespace = namespace
        self._registry = Registry()

    async def send(self, role: str, event: Event) -> None:
        await self._sender.xadd(self._stream(role), {b"e": self._registry.encode(event)})

    async def receive(
        self, role: str, joined: Callable[[], None], arrived: Callable[[Sequence[str]], None]
    ) -> None:
        stream = self._stream(role)
        async with Redis.from_url(self._url) as client:
            try:
                await client.xgroup_create(stream, GROUP, id="0", mkstream=True)
            except ResponseError as error:
                if not str(error).startswith("BUSYGROUP"):
                    raise
            joined()
            while True:
                entries = await _read(client, stream)
                bodies = [fields[b"e"] for _, fields in entries]
                arrived([self._registry.decode(body).id for body in bodies])
                if entries:
                    await client.xack(stream, GROUP, *[entry_id for entry_id, _ in entries])

    def _stream(self, role: str) -> str:
        return f"{self._namespace}:raw:{role}"


async def _read(client: Redis, stream: str) -> Entries:
    reply: Any = await client.xreadgroup(GROUP, "bench", {stream: ">"}, count=COUNT, block=BLOCK_MS)
    if not reply:
        return []
    # RESP3 gives a map of lists of entries, RESP2 pairs.
    if isinstance(reply, dict):
        (found,) = cast("dict[bytes, list[Entries]]", reply).values()
        return found[0]
    return cast("list[tuple[bytes, Entries]]", reply)[0][1]
