"""What only the MongoDB store promises: its errors, its deadlines, its server's death."""

import os
import time
from pathlib import Path

import anyio
import pytest

from aworld_runtime.errors import ConfigError, StoreError, StoreUnavailableError
from aworld_runtime.events import Event, MessagePosted, Registry
from aworld_runtime.store import open_store
from aworld_runtime.store.mongo import MongoStore
from tests.services import MongoServer, pymongo_sockets_collected, with_database
from tests.waiting import wait_until


def posted(seq: int) -> Event:
    return Event.of(MessagePosted(content=f"message {seq}"), source="user/1").at(seq)


async def test_unreachable_server_is_reported_in_time_without_the_password() -> None:
    began = time.monotonic()
    with pymongo_sockets_collected():
        message = await _refusal("mongodb://me:secret@127.0.0.1:1/x")
    assert time.monotonic() - began < 5
    assert "mongodb://me:***@127.0.0.1:1/x" in message
    assert "secret" not in message


async def test_url_that_is_none_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="mongodb://"):
        async with open_store("mongodb://host:port:1/"):
            pass


async def test_blob_larger_than_a_document_is_refused(mongo_database: str) -> None:
    async with MongoStore(mongo_database, Registry()) as store:
        name = await store.put_blob(bytes(15 * 1024 * 1024))
        assert await store.blob(name) is not None
        with pytest.raises(StoreError, match="too large"):
            await store.put_blob(bytes(16 * 1024 * 1024))


@pytest.mark.chaos
@pytest.mark.skipif("MONGODB_URL" in os.environ, reason="the given server is not ours to kill")
async def test_killed_server_loses_nothing_acknowledged_and_is_found_again(tmp_path: Path) -> None:
    with pymongo_sockets_collected():
        await _kill_and_restart(tmp_path)


async def _kill_and_restart(folder: Path) -> None:
    async with (
        MongoServer(folder) as server,
        MongoStore(with_database(server.url, "chaos"), Registry()) as store,
    ):
        acknowledged = 0

        async def write() -> None:
            nonlocal acknowledged
            while True:
                await store.put_events("log", [posted(acknowledged + 1)])
                acknowledged += 1

        async def kill_it_meanwhile() -> None:
            await wait_until(lambda: acknowledged > 100, 20, "the writer's progress")
            await server.kill()

        with pytest.RaisesGroup(StoreUnavailableError):
            async with anyio.create_task_group() as group:
                group.start_soon(write)
                group.start_soon(kill_it_meanwhile)
        await server.start()
        kept = await store.read("log", limit=1_000_000)
        assert len(kept) - acknowledged in (0, 1)
        assert [event.seq for event in kept] == list(range(1, len(kept) + 1))
        await store.put_events("log", [posted(len(kept) + 1)])


async def _refusal(url: str) -> str:
    with pytest.raises(StoreUnavailableError) as caught:
        async with open_store(url):
            pass
    return str(caught.value)
