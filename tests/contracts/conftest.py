"""Every contract runs over every backend of its interface, on real servers.

A service that can't be started skips its tests and says why; with REQUIRE_SERVICES=1 it fails them instead.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import quote
from uuid import uuid4

import pytest

from aworld_runtime.bus import Bus, open_bus
from aworld_runtime.bus.server import PrivateServer, find_server_binary
from aworld_runtime.errors import ConfigError
from aworld_runtime.events import Registry

BUSES = ("memory", "redis", "unix")


def pytest_configure(config: pytest.Config) -> None:
    """Print each contract on each backend where only contracts were asked for."""
    here = Path(__file__).parent
    if config.args and all(
        (config.invocation_params.dir / arg.partition("::")[0]).resolve().is_relative_to(here)
        for arg in config.args
    ):
        config.option.verbose = max(config.option.verbose, 1)


class Connect(Protocol):
    """Opens one more client of the same bus, as another process would. A memory bus is one object for all."""

    def __call__(self) -> AbstractAsyncContextManager[Bus]: ...


@dataclass(frozen=True)
class Backend:
    """A bus with nothing on it, and ways around its front door."""

    connect: Connect
    put_raw: Callable[[str, bytes], Awaitable[None]] | None = None
    """Put bytes that are no event on a queue; None where events aren't bytes."""


@pytest.fixture(scope="session")
async def bus_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[PrivateServer]:
    """One server for all tests; each takes a namespace of its own."""
    try:
        find_server_binary()
    except ConfigError as error:
        if os.environ.get("REQUIRE_SERVICES") == "1":
            raise
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("bus")
    async with PrivateServer(folder, options={"unixsocket": str(folder / "socket")}) as server:
        yield server


@pytest.fixture(params=BUSES)
def backend(request: pytest.FixtureRequest) -> Backend:
    kind: str = request.param
    if kind == "memory":
        only = open_bus("memory://")
        return Backend(lambda: nullcontext(only))
    server: PrivateServer = request.getfixturevalue("bus_server")
    where = server.url if kind == "redis" else f"unix://{quote(str(server.folder / 'socket'))}?db=0"
    url = f"{where}{'&' if '?' in where else '?'}namespace=test-{uuid4().hex[:12]}"
    return Backend(lambda: open_bus(url, Registry()))


@pytest.fixture
def connect(backend: Backend) -> Connect:
    return backend.connect


@pytest.fixture
async def bus(backend: Backend) -> AsyncIterator[Bus]:
    async with backend.connect() as bus:
        yield bus
