"""The server beside the bus, or the cluster: what it says about itself, and redis-py alone as the yardstick.

The only file here that knows redis-py; it is used as its documentation shows, with its defaults.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeAlias, cast

from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster
from redis.exceptions import ResponseError

from aworld_runtime.bus.redis.wire import Address
from aworld_runtime.events import Event, Registry

GROUP = "bench"
BLOCK_MS = 1000
COUNT = 100

Client: TypeAlias = Redis | RedisCluster
Entries: TypeAlias = list[tuple[bytes, dict[bytes, bytes]]]


class RawServer:
    """A Redis or Valkey server, or all of a cluster's, past the bus. Made by `raw_server`."""

    def __init__(self, address: Address, client: Client) -> None:
        self.namespace = address.namespace
        self._address = address
        self._client = client

    async def name(self) -> str:
        """`valkey 9.1.2`; of a cluster, with the number of its nodes."""
        facts = await self._facts("server")
        kind = facts[0].get("server_name", "redis")
        name = f"{kind} {facts[0].get(f'{kind}_version') or facts[0]['redis_version']}"
        return f"{name}, {len(facts)} nodes" if self._address.seeds else name

    async def cpu_s(self) -> float:
        """User and system time of all its threads, and of children that have ended; replicas count, too."""
        names = ("used_cpu_user", "used_cpu_sys", "used_cpu_user_children", "used_cpu_sys_children")
        return sum(float(facts[name]) for facts in await self._facts("cpu") for name in names)

    async def memory(self) -> int:
        """Bytes that its allocator has given out."""
        return sum(int(facts["used_memory"]) for facts in await self._facts("memory"))

    @asynccontextmanager
    async def transport(self) -> AsyncGenerator[RawTransport]:
        """For the latency phase."""
        async with _client(self._address) as sender:
            yield RawTransport(self._address, sender)

    async def _facts(self, section: str) -> list[dict[str, Any]]:
        """A section of INFO, of each server."""
        if isinstance(self._client, RedisCluster):
            nodes = self._client.get_nodes()
            return [await self._client.info(section, target_nodes=node) for node in nodes]
        return [await self._client.info(section)]

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
    async with _client(address) as client:
        server = RawServer(address, client)
        try:
            yield server
        finally:
            await server.clean()


def _client(address: Address) -> Client:
    make = RedisCluster if address.seeds else Redis
    return make.from_url(address.server_url)


class RawTransport:
    """XADD and XREADGROUP BLOCK, a stream for each role; bodies are encoded and decoded as the bus does."""

    def __init__(self, address: Address, sender: Client) -> None:
        self._address = address
        self._sender = sender
        self._registry = Registry()

    async def send(self, role: str, event: Event) -> None:
        await self._sender.xadd(self._stream(role), {b"e": self._registry.encode(event)})

    async def receive(
        self, role: str, joined: Callable[[], None], arrived: Callable[[Sequence[str]], None]
    ) -> None:
        stream = self._stream(role)
        async with _client(self._address) as client:
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
        return f"{self._address.namespace}:raw:{role}"


async def _read(client: Client, stream: str) -> Entries:
    reply: Any = await client.xreadgroup(GROUP, "bench", {stream: ">"}, count=COUNT, block=BLOCK_MS)
    if not reply:
        return []
    # RESP3 gives a map of lists of entries, RESP2 pairs.
    if isinstance(reply, dict):
        (found,) = cast("dict[bytes, list[Entries]]", reply).values()
        return found[0]
    return cast("list[tuple[bytes, Entries]]", reply)[0][1]
