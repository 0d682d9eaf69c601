"""What is particular to the bus on a Redis cluster: slots that move, nodes that die, a feed in 64 parts."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from urllib.parse import urlencode
from uuid import uuid4

import anyio
import pytest

from aworld_runtime.bus import Bus, FeedEntry, open_bus
from aworld_runtime.bus.redis.cluster import SHARDS, ClusterLink, slot_of
from aworld_runtime.bus.redis.keys import Keys
from aworld_runtime.bus.redis.shards import read_cursor
from aworld_runtime.bus.redis.wire import Address
from aworld_runtime.bus.server import PrivateServer
from aworld_runtime.errors import BusError, ConfigError, ProcessError
from aworld_runtime.events import Event, MessagePosted
from aworld_runtime.processes import HOST, free_port
from tests.certificates import Authority, tls_options
from tests.faults import kill, restart_empty
from tests.services import BusCluster, missing
from tests.waiting import wait_until

pytestmark = pytest.mark.anyio

LEASE_S = 1.0


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[BusCluster]:
    """One for all tests here; each leaves it whole."""
    async with BusCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def url(cluster: BusCluster) -> str:
    return f"{cluster.url}?namespace=test-{uuid4().hex[:12]}"


def note(text: str) -> Event:
    return Event.of(MessagePosted(content=text), source="writer/1")


async def texts(bus: Bus, log: str) -> list[str]:
    events = await bus.read(log)
    return [event.data.content for event in events if isinstance(event.data, MessagePosted)]


def slot_of_log(url: str, log: str) -> int:
    return slot_of(Keys(url.partition("namespace=")[2], SHARDS).log(log).log)


def slot_of_queue(url: str, queue: str) -> int:
    return slot_of(Keys(url.partition("namespace=")[2], SHARDS).queue(queue).work)


class Load:
    """Clients that append to logs, put work on a queue and do it, and follow the feed, until `stop`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.logs = [f"log{number}" for number in range(12)]
        self.appended = {log: list[str]() for log in self.logs}
        """What was acknowledged."""
        self.put: list[str] = []
        self.done: list[str] = []
        self.fed = {log: list[int]() for log in self.logs}
        """Seqs that the feed told of."""
        self._stopping = False

    async def run(self) -> None:
        async with (
            open_bus(self.url) as bus,
            open_bus(self.url) as other,
            anyio.create_task_group() as beside,
        ):
            beside.start_soon(self._follow, other)
            beside.start_soon(self._work, other)
            async with anyio.create_task_group() as writing:
                for log in self.logs:
                    writing.start_soon(self._append, bus, log)
                writing.start_soon(self._put, bus)
            await wait_until(self._is_done, 15.0, "all work done and all appends on the feed")
            beside.cancel_scope.cancel()

    def stop(self) -> None:
        self._stopping = True

    async def goes_on(self, *logs: str, by: int = 10) -> None:
        """Wait until more was appended to each of these logs."""
        before = {log: len(self.appended[log]) for log in logs or self.logs}
        await wait_until(
            lambda: all(len(self.appended[log]) >= before[log] + by for log in before),
            15.0,
            f"{by} more events in each of {list(before)}",
        )

    async def is_whole(self) -> None:
        """All that was acknowledged is there, once and in order."""
        async with open_bus(self.url) as bus:
            for log, written in self.appended.items():
                assert await texts(bus, log) == written
            assert await bus.backlog("queue") == 0

    async def _append(self, bus: Bus, log: str) -> None:
        for seq in itertools.count():
            if self._stopping:
                return
            assert await bus.append(log, seq, [note(str(seq))]) == seq + 1
            self.appended[log].append(str(seq))

    async def _put(self, bus: Bus) -> None:
        for number in itertools.count():
            if self._stopping:
                return
            await bus.put("queue", note(str(number)))
            self.put.append(str(number))
            await anyio.sleep(0.002)

    async def _work(self, bus: Bus) -> None:
        async with bus.consume("queue", consumer="c", credit=10, lease_s=LEASE_S) as consumer:
            while True:
                delivery = await consumer.take()
                assert isinstance(delivery.event.data, MessagePosted)
                self.done.append(delivery.event.data.content)
                await delivery.ack()

    async def _follow(self, bus: Bus) -> None:
        async with bus.feed() as feed:
            async for entries in feed:
                for entry in entries:
                    self.fed[entry.log] += range(entry.first, entry.last + 1)

    def _is_done(self) -> bool:
        return set(self.put) <= set(self.done) and all(
            self.fed[log] == list(range(1, len(self.appended[log]) + 1)) for log in self.logs
        )


# --- slots that move -----------------------------------------------------------------------------


async def test_slots_that_move_under_load_lose_and_reorder_nothing(
    cluster: BusCluster, url: str
) -> None:
    load = Load(url)
    moves: list[tuple[int, int, int]] = []
    for slot in (slot_of_log(url, "log0"), slot_of_queue(url, "queue")):
        source = cluster.owner(slot)
        moves.append((slot, source, (source + 1) % 3))
    async with anyio.create_task_group() as group:
        group.start_soon(load.run)
        await load.goes_on()
        for move in moves:
            await cluster.begin_to_move(*move)
            while await cluster.move_keys(*move):
                await load.goes_on("log1", by=1)
            await cluster.end_move(*move)
        await load.goes_on()
        load.stop()
    await load.is_whole()
    for slot, source, target in moves:
        await cluster.move(slot, target, source)


async def test_work_that_is_held_stays_held_while_its_queue_moves(
    cluster: BusCluster, url: str
) -> None:
    slot = slot_of_queue(url, "queue")
    source = cluster.owner(slot)
    target = (source + 1) % 3
    async with (
        open_bus(url) as bus,
        bus.consume("queue", consumer="c", lease_s=LEASE_S / 2) as consumer,
        open_bus(url) as other,
    ):
        await bus.put("queue", note("held"))
        delivery = await consumer.take()
        await cluster.begin_to_move(slot, source, target)
        await cluster.move_keys(slot, source, target)
        async with other.consume("queue", consumer="thief", lease_s=LEASE_S / 2) as thief:
            with anyio.move_on_after(LEASE_S):
                await thief.take()
                pytest.fail("taken over from who held it, while the queue moved")
            await cluster.end_move(slot, source, target)
            with anyio.move_on_after(LEASE_S):
                await thief.take()
                pytest.fail("taken over from who held it, after the queue had moved")
        await delivery.ack()
        assert not delivery.lost
        assert await bus.backlog("queue") == 0
    await cluster.move(slot, target, source)


async def test_a_cluster_at_rest_is_not_asked_who_owns_what(cluster: BusCluster, url: str) -> None:
    async def asked() -> int:
        facts = [await cluster.tell(node, "INFO", "commandstats") for node in range(3)]
        return sum(
            map(int, re.findall(r"cluster\|slots'?:.*?calls'?[=:] ?(\d+)", "\n".join(facts)))
        )

    async with open_bus(url) as bus:
        before = await asked()
        await cluster.tell(0, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        for number in range(20):
            await bus.append(f"log{number}", 0, [note("a")])

        async def was_asked_again() -> bool:
            return await asked() > before

        await wait_until(was_asked_again, description="a look at who owns what")
        await anyio.sleep(0.3)  # longer than the pauses of the first looks
        known = await asked()
        await anyio.sleep(1.2)  # longer than the longest pause between two
        assert await asked() == known


# --- nodes that die ------------------------------------------------------------------------------


@pytest.mark.chaos
async def test_a_killed_node_loses_nothing_acknowledged_and_holds_up_no_other(
    cluster: BusCluster, url: str
) -> None:
    load = Load(url)
    others = [log for log in load.logs if cluster.owner(slot_of_log(url, log)) != 1]
    async with anyio.create_task_group() as group:
        group.start_soon(load.run)
        await load.goes_on()
        await kill(cluster.nodes[1])
        await load.goes_on(*others, by=50)
        await cluster.nodes[1].start()
        await load.goes_on()
        load.stop()
    await load.is_whole()


@pytest.mark.chaos
async def test_a_replica_that_takes_over_is_found(tmp_path: Path) -> None:
    async with BusCluster(tmp_path) as cluster, cluster.replica_of(1, tmp_path / "replica"):
        url = f"{cluster.url}?namespace=test"
        log = next(f"log{n}" for n in range(20) if cluster.owner(slot_of_log(url, f"log{n}")) == 1)
        async with open_bus(url) as bus, bus.tail(log) as tail, bus.feed() as feed:
            await bus.append(log, 0, [note("a")])
            await first_entries(feed, 1)
            assert await cluster.tell(1, "WAIT", 1, 5000) == "1"
            await kill(cluster.nodes[1])
            with anyio.fail_after(25.0):  # an election that fails is held again after 4 s
                await bus.append(log, 1, [note("b")])
                assert [(await anext(tail)).seq for _ in range(2)] == [1, 2]
            assert [span(entry) for entry in await first_entries(feed, 1)] == [(log, 2, 2)]


async def test_a_bus_opens_while_a_node_is_away_and_finds_it_when_it_is_back(
    cluster: BusCluster, url: str
) -> None:
    logs = {cluster.owner(slot_of_log(url, f"log{n}")): f"log{n}" for n in range(20)}
    await kill(cluster.nodes[2])
    async with open_bus(url) as bus, anyio.create_task_group() as group:
        await bus.append(logs[0], 0, [note("a")])
        group.start_soon(bus.append, logs[2], 0, [note("b")])
        await cluster.nodes[2].start()
    async with open_bus(url) as bus:
        assert await texts(bus, logs[2]) == ["b"]


async def test_a_node_that_came_back_empty_loses_its_shards_alone(tmp_path: Path) -> None:
    """Its part of the feed begins anew; the other parts go on where they were."""
    async with BusCluster(tmp_path) as cluster, open_bus(cluster.url) as bus:
        logs = {
            cluster.owner(slot_of_log("namespace=aworld", f"log{n}")): f"log{n}" for n in range(20)
        }
        async with bus.feed() as feed:
            for log in logs.values():
                await bus.append(log, 0, [note("a")])
            await first_entries(feed, 3)
            feed_id = await bus.feed_id()
            lost = next(n for n in range(3) if n != cluster.owner(slot_of(b"{0}")))
            server_id = await bus.server_id()
            await restart_empty(cluster.nodes[lost])
            for log in logs.values():
                seq = await bus.last_seq(log)
                await bus.append(log, seq, [note("b")])
            entries = await first_entries(feed, 3)
        spans = {entry.log: (entry.first, entry.last) for entry in entries}
        assert spans == {log: (1, 1) if n == lost else (2, 2) for n, log in logs.items()}
        assert await bus.feed_id() == feed_id
        assert await bus.server_id() != server_id


# --- the feed ------------------------------------------------------------------------------------


async def first_entries(feed: AsyncIterator[list[FeedEntry]], count: int) -> list[FeedEntry]:
    found: list[FeedEntry] = []
    with anyio.fail_after(10.0):
        while len(found) < count:
            found += await anext(feed)
    return found


async def test_the_feed_resumes_in_each_shard_where_its_cursor_stood(url: str) -> None:
    logs = [f"log{number}" for number in range(100)]
    async with open_bus(url) as bus:
        for seq in range(3):
            for log in logs:
                await bus.append(log, seq, [note("a")])
        async with bus.feed() as feed:
            entries = await first_entries(feed, 300)
        for place in (0, 149, 298):
            async with bus.feed(entries[place].cursor) as feed:
                rest = await first_entries(feed, 299 - place)
            seen = {(entry.log, entry.first) for entry in entries[: place + 1]}
            told = {(entry.log, entry.first) for entry in rest}
            assert len(rest) == 299 - place
            assert not seen & told
        assert max(len(entry.cursor) for entry in entries) < 16 * SHARDS


async def test_a_feed_is_trimmed_behind_the_slowest_cursor_in_each_shard(url: str) -> None:
    logs = [f"log{number}" for number in range(20)]
    async with open_bus(url) as bus:
        for log in logs * 2:
            await bus.append(log, await bus.last_seq(log), [note("a")])
        async with bus.feed() as feed:
            entries = await first_entries(feed, 40)
        half, end = entries[19].cursor, entries[-1].cursor
        async with bus.feed(half) as feed:
            rest = await first_entries(feed, 20)
        await bus.trim_feed(half, end)
        async with bus.feed(half) as feed:
            assert sorted(map(span, await first_entries(feed, 20))) == sorted(map(span, rest))
        await bus.trim_feed(end)
        standing = sum(place != b"0" for place in read_cursor(end, SHARDS))
        async with bus.feed() as feed:
            # The entry at a cursor stays.
            assert {entry.last for entry in await first_entries(feed, standing)} == {2}


def span(entry: FeedEntry) -> tuple[str, int, int]:
    return entry.log, entry.first, entry.last


@pytest.mark.parametrize("cursor", ["1-0", "1,2", "," * 64, "x" + "," * 63])
async def test_another_feeds_cursor_is_refused(url: str, cursor: str) -> None:
    async with open_bus(url) as bus:
        with pytest.raises(BusError, match="no cursor"):
            async with bus.feed(cursor):
                pass


# --- refusals at the door ------------------------------------------------------------------------


async def test_a_node_is_no_single_server(cluster: BusCluster) -> None:
    with pytest.raises(ConfigError, match=r"use redis\+cluster://"):
        async with open_bus(cluster.nodes[0].url):
            pass


async def test_a_single_server_is_no_cluster(tmp_path: Path) -> None:
    async with PrivateServer(tmp_path) as server:
        with pytest.raises(ConfigError, match="use redis://"):
            async with open_bus(f"redis+cluster://127.0.0.1:{server.port}"):
                pass


async def test_every_node_is_asked_whether_it_evicts(cluster: BusCluster, url: str) -> None:
    async with AsyncExitStack() as undo:
        for name, wrong, right in (
            ("maxmemory", "64mb", "0"),
            ("maxmemory-policy", "allkeys-lru", "noeviction"),
        ):
            await cluster.tell(2, "CONFIG", "SET", name, wrong)
            undo.push_async_callback(cluster.tell, 2, "CONFIG", "SET", name, right)
        with pytest.raises(ConfigError, match=rf"node .*:{cluster.nodes[2].port}\).*noeviction"):
            async with open_bus(url):
                pass


async def test_a_cluster_behind_tls_is_spoken_to_with_tls_alone(tmp_path: Path) -> None:
    authority = Authority.found(tmp_path / "certificates")
    certificate = authority.issue("server")
    cluster = BusCluster(tmp_path)
    for node in cluster.nodes:
        node.options |= tls_options(authority, certificate, free_port()) | {"tls-cluster": "yes"}
    async with AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(cluster)
        except ProcessError as error:
            missing("Redis or Valkey with TLS", str(error))
        port = cluster.nodes[0].options["tls-port"]
        trusted = urlencode({"ssl_ca_certs": authority.file})
        async with (
            open_bus(f"rediss+cluster://{HOST}:{port}?{trusted}") as bus,
            bus.consume("queue", consumer="c", lease_s=LEASE_S / 2) as consumer,
        ):
            for number in range(9):
                await bus.append(f"log{number}", 0, [note("a")])
            await bus.put("queue", note("work"))
            delivery = await consumer.take()
            await anyio.sleep(LEASE_S)  # twice the lease
            await delivery.ack()
            assert not delivery.lost


async def test_one_node_that_answers_is_enough_to_find_the_others(
    cluster: BusCluster,
) -> None:
    async with open_bus(f"redis+cluster://127.0.0.1:1,127.0.0.1:{cluster.nodes[1].port}") as bus:
        assert await bus.last_seq("log") == 0


@pytest.mark.parametrize("path", ["/1", "?db=1"])
def test_a_cluster_has_one_database(path: str) -> None:
    with pytest.raises(ConfigError, match="database 0"):
        open_bus(f"redis+cluster://127.0.0.1:1{path}")


async def test_a_lease_that_outlives_its_event_loop_ends_without_a_traceback(url: str) -> None:
    link = ClusterLink(Address.parse(url), ())

    async def use() -> None:
        await link.connect()
        await link.close()

    await asyncio.to_thread(asyncio.run, use())

    link.doubt()  # as the lease's thread does where a program was interrupted with its bus open
