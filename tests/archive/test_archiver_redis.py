"""The archiver over a bus on a real server, which may be another one tomorrow."""

import sqlite3
import time
from pathlib import Path

from redis.asyncio import Redis

from aworld_runtime.archive.archiver import Archiver
from aworld_runtime.archive.logs import Logs
from aworld_runtime.archive.verify import compare
from aworld_runtime.bus import Bus, open_bus
from aworld_runtime.bus.server import PrivateServer
from aworld_runtime.events import Event, MessagePosted, Registry
from aworld_runtime.store.sqlite import SQLiteStore

HOUR_MS = 3_600_000


async def append(bus: Bus, log: str) -> None:
    await bus.append(log, 0, [Event.of(MessagePosted(content="hello"), source="solver/1")])


async def archive(bus: Bus, store: SQLiteStore) -> None:
    async with Archiver(bus, store) as archiver:
        await archiver.drain()


async def set_clock(server: PrivateServer, hours: int) -> None:
    """What is appended from now on has the place in the feed that a clock so far ahead gives it."""
    ahead = round(time.time() * 1000) + hours * HOUR_MS
    async with Redis.from_url(server.url) as client:
        await client.execute_command("XSETID", "aworld:{0}:feed", f"{ahead}-0")


async def test_large_content_is_in_the_store_before_the_bus_lets_it_go(tmp_path: Path) -> None:
    store = SQLiteStore(f"sqlite:///{tmp_path}/store.db", Registry())
    large = [Event.of(MessagePosted(content="x" * 200_000), source="solver/1") for _ in range(3)]
    async with store, PrivateServer(tmp_path / "server") as server, open_bus(server.url) as bus:
        for log in ("episode:1", "episode:2"):
            await bus.append(log, 0, large)
        await archive(bus, store)
        assert (await compare(bus, store)).same
        await bus.unlink("episode:1", keep_s=0)
        events = await Logs(bus, store).read_all("episode:1")
        assert events == [event.at(seq) for seq, event in enumerate(large, 1)]
        await bus.restore("episode:1", events)
        assert await bus.read("episode:1") == events


async def test_a_server_on_the_port_of_an_earlier_one_is_archived_from_its_beginning(
    tmp_path: Path,
) -> None:
    """By its clock, the earlier feed ended amid the new one."""
    file = tmp_path / "store.db"
    earlier = PrivateServer(tmp_path / "earlier")
    async with SQLiteStore(f"sqlite:///{file}", Registry()) as store:
        async with earlier, open_bus(earlier.url) as bus:
            await append(bus, "episode:1")
            await set_clock(earlier, 1)
            await append(bus, "episode:2")
            await archive(bus, store)
        new = PrivateServer(tmp_path / "new", port=earlier.port)
        async with new, open_bus(new.url) as bus:
            await append(bus, "episode:3")
            await set_clock(new, 2)
            await append(bus, "episode:4")
            await archive(bus, store)
        assert new.url == earlier.url
        assert await store.logs() == ["episode:1", "episode:2", "episode:3", "episode:4"]
    with sqlite3.connect(file) as database:
        followers = [str(name) for (name,) in database.execute("SELECT follower FROM cursors")]
    database.close()
    assert len(followers) == 2
    assert not any("://" in name for name in followers)
