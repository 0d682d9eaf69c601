"""What is particular to the bus on Redis: servers that die, stall, fill up, come back empty or refuse."""

from __future__ import annotations

import re
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import accumulate
from pathlib import Path
from typing import cast

import anyio
import hiredis
import pytest
from anyio.abc import SocketStream
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as Cut
from redis.exceptions import ResponseError

from aworld_runtime.bus import Bus, open_bus
from aworld_runtime.bus.base import DEAD_MAIL, NodeInfo
from aworld_runtime.bus.redis import RedisBus
from aworld_runtime.bus.redis.clock import Clock
from aworld_runtime.bus.redis.consumer import READ_MOST, SHARE
from aworld_runtime.bus.redis.entries import BODY, PACKED_BYTES, SIZES
from aworld_runtime.bus.redis.keys import GROUP, Keys
from aworld_runtime.bus.redis.link import BATCH_CALLS
from aworld_runtime.bus.server import PrivateServer
from aworld_runtime.errors import (
    BusFullError,
    BusUnavailableError,
    ConfigError,
    Fenced,
    MalformedEventError,
    MissingBlobError,
    ProcessError,
    UnknownEventTypeError,
)
from aworld_runtime.events import (
    REFUSE_ABOVE,
    EpisodeCancelled,
    EpisodeTakenOver,
    Event,
    MessagePosted,
    Registry,
)
from aworld_runtime.processes import HOST, spawn
from tests.waiting import wait_until

pytestmark = pytest.mark.anyio

LEASE_S = 0.5


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[PrivateServer]:
    """A server for one test, which may do to it what it likes."""
    async with PrivateServer(tmp_path / "server") as server:
        yield server


def note(text: str) -> Event:
    return Event.of(MessagePosted(content=text), source="writer/1")


async def texts(bus: Bus, log: str) -> list[str]:
    events = await bus.read(log)
    return [event.data.content for event in events if isinstance(event.data, MessagePosted)]


async def kill(server: PrivateServer) -> None:
    assert server.process is not None
    server.process.send_signal(signal.SIGKILL)
    await server.process.wait(deadline=5.0)


def forget_data(server: PrivateServer) -> None:
    for file in (server.folder / "appendonlydir").iterdir():
        file.unlink()


# --- the private server --------------------------------------------------------------------------


async def test_a_private_server_keeps_data_and_port_over_restarts(tmp_path: Path) -> None:
    server = PrivateServer(tmp_path / "server")
    async with server:
        url = server.url
        async with open_bus(url) as bus:
            await bus.append("log", 0, [note("kept")])
    async with server, open_bus(server.url) as bus:
        assert server.url == url
        assert await texts(bus, "log") == ["kept"]


async def test_a_taken_port_is_a_clear_error(server: PrivateServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"port {server.port} .* taken"):
        await PrivateServer(tmp_path / "other", server.port).start()


async def test_a_server_is_started_again_while_the_former_one_still_holds_the_port(
    server: PrivateServer,
) -> None:
    await kill(server)
    assert server.port is not None
    with socket.socket() as dying:
        dying.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        dying.bind((HOST, server.port))
        dying.listen()
        async with anyio.create_task_group() as group:
            group.start_soon(server.start)
            await anyio.wait_all_tasks_blocked()
            dying.close()
    async with open_bus(server.url) as bus:
        assert await bus.last_seq("log") == 0


async def test_a_server_that_hangs_is_killed(server: PrivateServer) -> None:
    assert server.process is not None
    codes: list[int] = []

    async def watch() -> None:
        codes.append(await server.watch(hung_s=0.5))

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        with pytest.raises(ProcessError, match="still runs"):
            await server.process.wait(deadline=1.0)  # it answers, so it is left alone
        server.process.send_signal(signal.SIGSTOP)
    assert codes == [-signal.SIGKILL]


async def test_two_servers_never_share_a_folder(server: PrivateServer) -> None:
    with pytest.raises(ConfigError, match="another private server uses"):
        await PrivateServer(server.folder).start()


async def test_a_server_that_ends_at_once_shows_the_last_lines_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(ProcessError, match="no-such-setting"):
        await PrivateServer(tmp_path, options={"no-such-setting": "1"}).start()


# --- refusals at the door ------------------------------------------------------------------------


async def test_a_server_that_evicts_is_refused(tmp_path: Path) -> None:
    options = {"maxmemory": "64mb", "maxmemory-policy": "allkeys-lru"}
    async with PrivateServer(tmp_path, options=options) as server:
        with pytest.raises(ConfigError, match="noeviction"):
            async with open_bus(server.url):
                pass


async def test_an_old_server_is_refused() -> None:
    async def serve(stream: SocketStream) -> None:
        """Just enough of a server to be asked for its version."""
        commands = hiredis.Reader()
        async with stream:
            async for data in stream:
                commands.feed(data)
                while command := commands.gets():
                    text = b"redis_version:6.2.14\r\n" if command[0] == b"INFO" else b"x"
                    await stream.send(b"$%d\r\n%s\r\n" % (len(text), text))

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(anyio.abc.SocketAttribute.local_port)  # noqa: S610
    async with listener, anyio.create_task_group() as tg:
        tg.start_soon(listener.serve, serve)
        with pytest.raises(ConfigError, match=re.escape("6.2.14; 7.0 or newer")):
            async with open_bus(f"redis://127.0.0.1:{port}"):
                pass
        tg.cancel_scope.cancel()


async def test_an_unreachable_server_is_a_clear_error_without_the_password() -> None:
    with pytest.raises(BusUnavailableError, match="no bus at redis://me:") as caught:
        async with open_bus("redis://me:secret@127.0.0.1:1/0"):
            pass
    assert "secret" not in str(caught.value)


async def test_a_mute_server_is_given_up_within_5_seconds() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        before = time.monotonic()
        with pytest.raises(BusUnavailableError, match="no answer"):
            async with open_bus(f"redis://127.0.0.1:{mute.getsockname()[1]}"):
                pass
        assert time.monotonic() - before < 5.0


async def test_a_wrong_password_is_a_clear_error(tmp_path: Path) -> None:
    async with PrivateServer(tmp_path) as server:
        url = server.url.replace("redis://", "redis://nobody:secret@")
        with pytest.raises(ConfigError, match="password") as caught:
            async with open_bus(url):
                pass
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url, complaint",
    [
        ("redis://localhost/0?namespce=x", "namespce"),
        ("redis://localhost/0?namespace={x}", "namespace"),
        ("redis://localhost/0?outage_s=soon", "soon"),
        ("redis://localhost/0?outbox_mb=much", "much"),
        ("redis://localhost/0?queue_limit=0", "queue_limit=0"),
        ("memory://?mail_limit=few", "few"),
        ("memory://?namespace=x", "namespace"),
    ],
)
def test_a_wrong_parameter_in_the_url_is_named(url: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        open_bus(url)


async def test_a_closed_bus_refuses_calls(server: PrivateServer) -> None:
    bus = open_bus(server.url)
    with pytest.raises(BusUnavailableError, match="not open"):
        await bus.last_seq("log")


async def test_namespaces_do_not_mix(server: PrivateServer) -> None:
    async with (
        open_bus(f"{server.url}?namespace=a") as a,
        open_bus(f"{server.url}?namespace=b") as b,
    ):
        await a.append("log", 0, [note("a")])
        assert await b.last_seq("log") == 0


# --- trouble on the way --------------------------------------------------------------------------


async def test_processes_of_one_name_are_listed_each_by_itself(server: PrivateServer) -> None:
    async with open_bus(server.url) as bus, open_bus(server.url) as other:
        for pid, one in enumerate((bus, other, bus), 1):
            await one.announce(NodeInfo(name="worker/w", kind="worker", pid=pid))
        assert {node.pid for node in await bus.nodes()} == {2, 3}
        await other.withdraw("worker/w")
        assert [node.pid for node in await bus.nodes()] == [3]


async def put_until_refused(bus: Bus, content: str) -> None:
    for _ in range(10_000):
        try:
            await bus.put("filler", note(content))
        except BusFullError:
            return
    pytest.fail("never full")


async def test_a_full_server_refuses_events_and_serves_reads_and_acks(tmp_path: Path) -> None:
    async with (
        PrivateServer(tmp_path, options={"maxmemory": "8mb"}) as server,
        open_bus(server.url) as bus,
        bus.consume("queue", consumer="c") as consumer,
    ):
        await bus.put("queue", note("work"))
        delivery = await consumer.take()
        await bus.append("log", 0, [note(str(number)) for number in range(100)])
        feed_id = await bus.feed_id()
        for size in (3000, 100):
            await put_until_refused(bus, "x" * size)
        with pytest.raises(BusFullError, match="maxmemory"):
            await bus.append("log", 100, [note("x" * 3000)])
        with pytest.raises(BusFullError):
            await bus.send_mail("log", note("x" * 3000))
        assert await bus.last_seq("log") == 100
        assert len(await bus.read("log")) == 100
        assert await bus.feed_id() == feed_id
        await delivery.ack()
        assert await bus.backlog("queue") == 0


async def test_work_is_settled_once_a_server_that_refuses_every_change_accepts_one(
    server: PrivateServer,
) -> None:
    async with (
        open_bus(server.url) as bus,
        Redis.from_url(server.url) as admin,
        bus.consume("queue", consumer="c") as consumer,
    ):
        await bus.put("queue", note("work"))
        delivery = await consumer.take()
        # As with a full disk: memory is free, yet no script may write.
        await admin.config_set("min-replicas-to-write", 1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(delivery.ack)
            with pytest.raises(BusFullError):
                await bus.put("queue", note("more"))
            await admin.config_set("min-replicas-to-write", 0)
        assert await bus.backlog("queue") == 0


async def test_a_consumer_that_joins_a_full_server_waits_for_room_and_says_so_once(
    server: PrivateServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_bus(server.url) as bus, Redis.from_url(server.url) as admin:

        async def count(fact: str) -> int:
            return int((await admin.info("stats"))[fact])

        await admin.config_set("maxmemory", 1)
        async with bus.consume("queue", consumer="c") as consumer, anyio.create_task_group() as tg:
            taken: list[Event] = []

            async def take() -> None:
                taken.append((await consumer.take()).event)

            tg.start_soon(take)
            await wait_until(lambda: "waits until the bus has room" in caplog.text)
            before = await count("total_connections_received"), await count("total_error_replies")
            await anyio.sleep(1.0)
            assert await count("total_connections_received") - before[0] <= 1
            assert await count("total_error_replies") - before[1] < 30
            await admin.config_set("maxmemory", 0)
            await bus.put("queue", note("work"))
            await wait_until(lambda: bool(taken), description="the work")
    assert len([r for r in caplog.records if "queue 'queue'" in r.getMessage()]) <= 2


async def test_a_full_server_lets_broadcasts_through(tmp_path: Path) -> None:
    async with (
        PrivateServer(tmp_path, options={"maxmemory": "8mb"}) as server,
        open_bus(server.url) as bus,
        bus.listen("channel") as heard,
    ):
        await put_until_refused(bus, "x" * 3000)
        await bus.broadcast("channel", "token")
        with anyio.fail_after(5.0):
            assert await anext(heard) == "token"


async def test_a_broadcast_waits_for_no_server_that_is_away(server: PrivateServer) -> None:
    async with open_bus(server.url) as bus:
        assert server.process is not None
        server.process.send_signal(signal.SIGSTOP)
        before = time.monotonic()
        for number in range(100):
            await bus.broadcast("channel", number)
        await kill(server)
        for number in range(100):
            await bus.broadcast("channel", number)
        assert time.monotonic() - before < 4.0
        await server.start()
        async with bus.listen("channel") as heard, anyio.create_task_group() as tg:

            async def keep_telling() -> None:
                while True:  # lossy: until the bus is back
                    await bus.broadcast("channel", "back")
                    await anyio.sleep(0.05)

            tg.start_soon(keep_telling)
            with anyio.fail_after(5.0):
                assert await anext(heard) == "back"
            tg.cancel_scope.cancel()


async def test_what_waits_for_a_server_is_bounded_and_then_there_once_and_in_order(
    server: PrivateServer,
) -> None:
    accepted: list[int] = []
    refused: list[str] = []
    most = 0
    async with open_bus(f"{server.url}?outbox_mb=1") as bus:
        assert isinstance(bus, RedisBus)

        async def put(number: int) -> None:
            nonlocal most
            try:
                await bus.put("queue", note(f"{number} {'x' * 3000}"))
                accepted.append(number)
            except BusFullError as error:
                refused.append(str(error))
                most = max(most, bus.waiting_bytes)

        await kill(server)
        async with anyio.create_task_group() as tg:
            for number in range(1000):
                tg.start_soon(put, number)
            await wait_until(lambda: len(refused) > 500, description="the outbox is full")
            tg.start_soon(bus.last_seq, "log")  # what adds nothing may wait
            await server.start()
        assert 1024 * 1024 - 4000 < most <= 1024 * 1024
        assert "outbox_mb=1" in refused[0]
        assert bus.waiting_bytes == 0
        await bus.put("queue", note("1000 after"))
        async with bus.consume("queue", consumer="c", credit=2000) as consumer:
            there: list[int] = []
            while len(there) < await bus.backlog("queue"):
                for delivery in await consumer.take_many(1000):
                    assert isinstance(delivery.event.data, MessagePosted)
                    there.append(int(delivery.event.data.content.split()[0]))
        assert there == [*sorted(accepted), 1000]
        assert len(accepted) + len(refused) == 1000


async def test_large_content_is_kept_once_beside_its_log_and_freed_with_it(
    server: PrivateServer,
) -> None:
    keys = Keys("aworld").log("log")
    large = [note("x" * 200_000) for _ in range(3)]
    async with open_bus(server.url) as bus, Redis.from_url(server.url) as admin:
        await bus.append("log", 0, [*large[:2], note("small")])
        await bus.append("log", 3, [large[2], note("y" * 200_000)])
        assert (await admin.memory_usage(keys.log) or 0) < 5000
        assert (await admin.hlen(keys.blobs), await admin.ttl(keys.blobs)) == (2, -1)
        await bus.unlink("log")
        assert await admin.hlen(keys.blobs) == 1  # that of the last event
        assert 0 < await admin.ttl(keys.blobs) == await admin.ttl(keys.log)
        await bus.unlink("log", keep_s=0)
        assert not await admin.exists(keys.blobs)


async def test_events_appended_at_once_share_entries_of_bounded_size(server: PrivateServer) -> None:
    keys = Keys("aworld").log("log")
    sizes = [1, *[2000] * 20, PACKED_BYTES, 3, 4]
    events = [note(f"{seq:06d}" * (size // 6 + 1)) for seq, size in enumerate(sizes)]
    async with open_bus(server.url) as bus, Redis.from_url(server.url) as admin:
        await bus.append("log", 0, events)
        await bus.append("log", len(events), [note("alone")])
        kept = cast("list[tuple[bytes, dict[bytes, bytes]]]", await admin.xrange(keys.log))
        shared = [len(fields[SIZES].split()) if SIZES in fields else 1 for _, fields in kept]
        assert sum(shared) == len(events) + 1
        assert len(shared) < 10
        for (entry_id, fields), number in zip(kept, shared, strict=True):
            assert len(fields[BODY]) <= PACKED_BYTES or number == 1, entry_id
        assert [int(entry_id.split(b"-")[0]) for entry_id, _ in kept] == [*accumulate(shared)]
        assert [event.id for event in await bus.read("log", limit=24)] == [e.id for e in events]


@pytest.mark.parametrize(
    "fields",
    [
        {BODY: b"{}{}", SIZES: b"2 3"},
        {BODY: b"{}{}", SIZES: b"2 x"},
        {BODY: b"{}{}", SIZES: b"-2 6"},
        {b"x": b"{}"},
        {SIZES: b"1"},
    ],
    ids=str,
)
async def test_a_damaged_entry_of_a_log_is_a_clear_error(
    server: PrivateServer, fields: dict[bytes, bytes]
) -> None:
    async with open_bus(server.url) as bus, Redis.from_url(server.url) as admin:
        await bus.append("log", 0, [note("one")])
        await admin.xadd(Keys("aworld").log("log").log, {**fields}, id="3-0")
        assert len(await bus.read("log", limit=1)) == 1
        with pytest.raises(MalformedEventError, match="entry 3-0 of log 'log' is damaged"):
            await bus.read("log")
        async with bus.tail("log", 2) as tail:
            with pytest.raises(MalformedEventError, match="entry 3-0 of log 'log' is damaged"):
                await anext(tail)


async def test_content_of_a_refused_append_does_not_stay(server: PrivateServer) -> None:
    blobs = Keys("aworld").log("log").blobs
    async with open_bus(server.url) as bus, Redis.from_url(server.url) as admin:
        with pytest.raises(Fenced):
            await bus.append("log", 7, [note("x" * 200_000)])
        assert await admin.ttl(blobs) > 0
        await bus.append("log", 0, [note("x" * 200_000)])
        assert await admin.ttl(blobs) == -1


@pytest.mark.parametrize("content", [None, b"forged"], ids=["missing", "damaged"])
async def test_an_event_whose_content_is_gone_or_damaged_is_a_clear_error(
    server: PrivateServer, content: bytes | None
) -> None:
    blobs = Keys("aworld").log("log").blobs
    async with open_bus(server.url) as bus, Redis.from_url(server.url) as admin:
        await bus.append("log", 0, [note("small"), note("x" * 200_000)])
        [name] = cast("list[bytes]", await admin.hkeys(blobs))
        if content is None:
            await admin.hdel(blobs, name)
        else:
            await admin.hset(blobs, name, content)
        with pytest.raises(MissingBlobError, match=name.decode()):
            await bus.read("log")
        async with bus.tail("log") as tail:
            assert (await anext(tail)).seq == 1
            with pytest.raises(MissingBlobError, match=name.decode()):
                await anext(tail)


async def test_work_that_no_reader_could_hold_is_buried_unread_and_the_rest_flows(
    tmp_path: Path,
) -> None:
    work = Keys("aworld").queue("queue").work
    async with (
        PrivateServer(tmp_path, options={"proto-max-bulk-len": "512mb"}) as server,
        open_bus(server.url) as bus,
        Redis.from_url(server.url) as admin,
    ):
        await bus.put("queue", note("before"))
        await admin.xadd(work, {BODY: bytes(READ_MOST + 1)})
        await bus.put("queue", note("after"))
        async with bus.consume("queue", consumer="c", credit=8, lease_s=LEASE_S) as consumer:
            found: set[str] = set()
            with anyio.fail_after(15.0):
                while len(found) < 2:
                    for delivery in await consumer.take_many(8):
                        assert isinstance(delivery.event.data, MessagePosted)
                        found.add(delivery.event.data.content)
                        await delivery.ack()
        assert found == {"before", "after"}
        [letter] = await bus.dead_letters("queue")
        assert str(READ_MOST + 1)[:5] in letter.reason
        assert len(letter.raw) == 1000
        assert await bus.backlog("queue") == 0


async def test_a_private_server_takes_nothing_that_no_event_may_be(server: PrivateServer) -> None:
    async with Redis.from_url(server.url) as admin:
        with pytest.raises((Cut, ResponseError)):
            await admin.set("key", bytes(2 * REFUSE_ABOVE + 1))
        assert not await admin.exists("key")


async def test_cut_connections_neither_lose_nor_double_an_append(server: PrivateServer) -> None:
    total = 200
    done = anyio.Event()

    async def cut() -> None:
        async with Redis.from_url(server.url) as client:
            while not done.is_set():
                await client.client_kill_filter(_type="normal", skipme=True)
                await anyio.sleep(0.005)

    async with open_bus(server.url) as bus, anyio.create_task_group() as tg:
        tg.start_soon(cut)
        for number in range(total):
            assert await bus.append("log", number, [note(str(number))]) == number + 1
        done.set()
    async with open_bus(server.url) as bus:
        assert await texts(bus, "log") == [str(number) for number in range(total)]


async def test_listeners_and_consumers_find_back_after_a_restart(server: PrivateServer) -> None:
    async with (
        open_bus(server.url) as bus,
        bus.consume("queue", consumer="c") as consumer,
        bus.mailbox("log") as box,
        bus.feed() as feed,
        bus.listen("channel") as heard,
    ):
        await server.stop()
        await server.start()
        await bus.put("queue", note("work"))
        await bus.send_mail("log", note("mail"))
        await bus.append("log", 0, [note("event")])
        with anyio.fail_after(5.0):
            assert (await consumer.take()).count == 1
            assert len(await anext(box)) == 1
            assert [entry.last for entry in await anext(feed)] == [1]
            async with anyio.create_task_group() as tg:

                async def keep_telling() -> None:
                    while True:  # lossy: until the listener is back
                        await bus.broadcast("channel", 1)
                        await anyio.sleep(0.05)

                tg.start_soon(keep_telling)
                assert await anext(heard) == 1
                tg.cancel_scope.cancel()


async def test_a_server_that_stays_away_fails_every_call_in_time(server: PrivateServer) -> None:
    async with (
        open_bus(f"{server.url}?outage_s=1") as bus,
        bus.consume("queue", consumer="c") as consumer,
        bus.mailbox("log") as box,
        bus.feed() as feed,
    ):
        await kill(server)
        failed: list[str] = []

        async def must_fail(name: str, call: Callable[[], Awaitable[object]]) -> None:
            with pytest.raises(BusUnavailableError):
                await call()
            failed.append(name)

        with anyio.fail_after(10.0):
            async with anyio.create_task_group() as tg:
                tg.start_soon(must_fail, "append", lambda: bus.append("log", 0, [note("a")]))
                tg.start_soon(must_fail, "take", consumer.take)
                tg.start_soon(must_fail, "mailbox", lambda: anext(box))
                tg.start_soon(must_fail, "feed", lambda: anext(feed))
        assert sorted(failed) == ["append", "feed", "mailbox", "take"]


async def test_a_feeds_id_lives_as_long_as_its_data(server: PrivateServer) -> None:
    async with open_bus(server.url) as bus:
        first = await bus.feed_id()
        await server.stop()
        await server.start()
        assert await bus.feed_id() == first
        async with Redis.from_url(server.url) as client:
            await client.flushall()
        second = await bus.feed_id()
        await server.stop()
        forget_data(server)
        await server.start()
        assert len({first, second, await bus.feed_id()}) == 3


async def test_a_server_that_comes_back_empty_is_noticed_and_used(server: PrivateServer) -> None:
    """The owner's append is refused, so it restores or fails; queue and feed begin anew."""
    async with (
        open_bus(server.url) as bus,
        bus.consume("queue", consumer="c") as consumer,
        bus.feed() as feed,
    ):
        await bus.put("queue", note("lost"))
        delivery = await consumer.take()
        await bus.append("log", 0, [note("a"), note("b")])
        stored = await bus.read("log")
        await anext(feed)

        await server.stop()
        forget_data(server)
        await server.start()

        with pytest.raises(Fenced, match="the log is empty"):
            await bus.append("log", 2, [note("c")])
        await bus.restore("log", stored)
        assert await bus.append("log", 2, [note("c")]) == 3
        await bus.put("queue", note("new"))
        with anyio.fail_after(5.0):
            told: list[int] = []
            while len(told) < 2:
                told += [entry.first for entry in await anext(feed)]
            assert told == [1, 3]
            await delivery.ack()
            assert (await consumer.take()).event.data == MessagePosted(content="new")
            await wait_until(lambda: delivery.lost, description="the lost delivery known as lost")


@pytest.mark.chaos
async def test_kill_9_of_the_server_loses_no_acknowledged_event(
    server: PrivateServer, caplog: pytest.LogCaptureFixture
) -> None:
    acknowledged = dict[str, list[str]]()
    stop = anyio.Event()

    async def append(bus: Bus, log: str) -> None:
        acknowledged[log] = []
        seq = 0
        while not stop.is_set():
            seq = await bus.append(log, seq, [note(f"{seq}")])
            acknowledged[log].append(str(seq - 1))

    async with open_bus(server.url) as bus:
        async with anyio.create_task_group() as tg:
            for number in range(5):
                tg.start_soon(append, bus, f"log{number}")
            for _ in range(3):
                before = sum(map(len, acknowledged.values()))
                await wait_until(
                    lambda before=before: sum(map(len, acknowledged.values())) > before + 100,
                    timeout=10.0,
                    description="a hundred more appends",
                )
                await kill(server)
                await server.start()
            stop.set()
        for log, written in acknowledged.items():
            assert await texts(bus, log) == written
    assert 1 <= caplog.text.count("can't be reached") <= 3, "once for each outage"
    assert caplog.text.count(" is back after ") == caplog.text.count("can't be reached")


@pytest.mark.chaos
async def test_a_server_that_stands_still_doubles_no_append(server: PrivateServer) -> None:
    assert server.process is not None
    async with open_bus(server.url) as bus, anyio.create_task_group() as tg:
        await bus.append("log", 0, [note("before")])
        server.process.send_signal(signal.SIGSTOP)

        async def go_on() -> None:
            assert server.process is not None
            await anyio.sleep(7.0)  # longer than a reply may take
            server.process.send_signal(signal.SIGCONT)

        tg.start_soon(go_on)
        await bus.append("log", 1, [note("while it stood")])
        await bus.append("log", 2, [note("after")])
        assert await texts(bus, "log") == ["before", "while it stood", "after"]


# --- leases --------------------------------------------------------------------------------------


async def test_a_busy_event_loop_does_not_lose_its_lease(server: PrivateServer) -> None:
    stolen: list[int] = []
    over = threading.Event()

    def steal() -> None:
        async def main() -> None:
            async with (
                open_bus(server.url) as bus,
                bus.consume("queue", consumer="thief", lease_s=LEASE_S) as thief,
            ):
                while not over.is_set():
                    with anyio.move_on_after(0.1):
                        stolen.append((await thief.take()).count)

        anyio.run(main)

    async with (
        open_bus(server.url) as bus,
        bus.consume("queue", consumer="busy", lease_s=LEASE_S) as consumer,
    ):
        await bus.put("queue", note("long"))
        delivery = await consumer.take()
        thread = threading.Thread(target=steal)
        thread.start()
        try:
            end = time.monotonic() + 3 * LEASE_S
            while time.monotonic() < end:
                pass  # hold the loop and, as far as Python lets us, the interpreter
            assert not delivery.lost
            assert not stolen
            await delivery.ack()
            assert await bus.backlog("queue") == 0
        finally:
            over.set()
            await anyio.to_thread.run_sync(thread.join)


async def test_what_was_lost_to_one_that_died_comes_back_as_another_delivery(
    server: PrivateServer,
) -> None:
    work = Keys("aworld").queue("queue").work
    async with (
        open_bus(server.url) as bus,
        Redis.from_url(server.url) as admin,
        bus.consume("queue", consumer="c", credit=2, lease_s=LEASE_S) as consumer,
    ):
        await bus.put("queue", note("a"))
        lost = await consumer.take()
        entries = cast("list[tuple[bytes, dict[bytes, bytes]]]", await admin.xrange(work))
        await admin.xclaim(work, GROUP, "another, who dies", 0, [entries[0][0]])
        await wait_until(lambda: lost.lost, description="its loss is known")
        with anyio.fail_after(LEASE_S + 3.0):
            again = await consumer.take()
        assert (await lost.standing(), await again.standing()) == ("taken", "held")
        await lost.ack()
        assert await bus.backlog("queue") == 1
        await again.ack()
        assert await bus.backlog("queue") == 0


async def test_the_work_of_a_dead_consumer_is_spread_over_those_that_wait(
    server: PrivateServer,
) -> None:
    count = 60
    heirs: list[str] = []

    async def inherit(name: str) -> None:
        async with (
            open_bus(server.url) as bus,
            bus.consume("queue", consumer=name, credit=count, lease_s=LEASE_S) as heir,
        ):
            while True:
                await heir.take()
                heirs.append(name)

    async with open_bus(server.url) as bus, anyio.create_task_group() as tasks:
        await bus.put("queue", *(note(str(number)) for number in range(count)))
        async with bus.consume("queue", consumer="dies", credit=count, lease_s=LEASE_S) as dying:
            held = 0
            while held < count:
                held += len(await dying.take_many(count - held))
            for name in ("one", "two"):
                tasks.start_soon(inherit, name)
            dying.abandon()
            await wait_until(lambda: len(heirs) == count, description="all is taken over")
        tasks.cancel_scope.cancel()
    assert min(heirs.count("one"), heirs.count("two")) >= SHARE


ZOMBIE = """
import sys, anyio
from aworld_runtime.bus import open_bus
from aworld_runtime.errors import Fenced
from aworld_runtime.events import Event, MessagePosted

async def main():
    async with open_bus(sys.argv[1]) as bus:
        async with bus.consume("episodes", consumer="zombie", lease_s=float(sys.argv[2])) as consumer:
            delivery = await consumer.take()
            seq = 0
            while True:
                event = Event.of(MessagePosted(content="zombie"), source="worker/1")
                try:
                    seq = await bus.append("log", seq, [event])
                except Fenced:
                    print("fenced", flush=True)
                    await delivery.ack()
                    with anyio.move_on_after(5):
                        while not delivery.lost:
                            await anyio.sleep(0.01)
                    print("lost" if delivery.lost else "still holds", flush=True)
                    return
                await anyio.sleep(0.02)

anyio.run(main)
"""


@pytest.mark.chaos
async def test_a_worker_that_was_stopped_and_continued_is_fenced(
    server: PrivateServer, tmp_path: Path
) -> None:
    script = tmp_path / "zombie.py"
    script.write_text(ZOMBIE)
    async with open_bus(server.url) as bus:
        await bus.put("episodes", note("episode"))
        command = [sys.executable, script, server.url, str(LEASE_S)]
        async with await spawn(command, log=tmp_path / "zombie.log") as zombie:

            async def has_begun() -> bool:
                return await bus.last_seq("log") >= 3

            await wait_until(has_begun, timeout=20.0, description="the worker's first appends")
            async with bus.consume("episodes", consumer="heir", lease_s=LEASE_S) as heir:
                with anyio.move_on_after(2 * LEASE_S):
                    await heir.take()
                    pytest.fail("taken over from a worker that lives")
                zombie.send_signal(signal.SIGSTOP)
                with anyio.fail_after(LEASE_S + 1.0):
                    delivery = await heir.take()
                assert delivery.count == 2
                seq = await bus.last_seq("log")
                takeover = Event.of(EpisodeTakenOver(worker="worker/2"), source="worker/2")
                seq = await bus.append("log", seq, [takeover])
                zombie.send_signal(signal.SIGCONT)
                await zombie.wait(deadline=10.0)
                assert zombie.log_tail().splitlines() == ["fenced", "lost"]
                assert await bus.last_seq("log") == seq
                assert not delivery.lost
                assert await bus.backlog("episodes") == 1
                await delivery.ack()
                assert await bus.backlog("episodes") == 0


def test_the_shared_clock_is_the_servers_and_goes_on_by_itself() -> None:
    clock = Clock()
    in_1970 = (b"3600", b"500000")
    clock.hear(in_1970)
    first = clock.now()
    assert 3600.5 <= first.timestamp() < 3610
    assert clock.now() >= first


async def test_mail_that_cannot_be_read_can_be_mailed_again(server: PrivateServer) -> None:
    """As when a module that defines an event type was not imported."""
    ignorant = Registry()
    del ignorant.types["message.posted"]
    async with open_bus(server.url) as bus:
        await bus.send_mail("log", note("news"))
        async with open_bus(server.url, ignorant) as owner, owner.mailbox("log") as box:
            with anyio.move_on_after(0.5):
                await anext(box)
        assert await bus.dead_letter_queues() == [DEAD_MAIL]
        (letter,) = await bus.dead_letters(DEAD_MAIL)
        assert (letter.log, "message.posted" in letter.reason) == ("log", True)
        await bus.requeue(DEAD_MAIL, letter.id)
        assert await bus.dead_letter_queues() == []
        async with bus.mailbox("log") as box:
            (mail,) = await anext(box)
        assert mail.event.data == MessagePosted(content="news")


async def test_an_event_in_a_log_that_cannot_be_read_is_named(server: PrivateServer) -> None:
    ignorant = Registry()
    del ignorant.types["message.posted"]
    told = rf"event 2 of log in {re.escape(server.url)} can't be read: unknown event type"
    async with open_bus(server.url) as bus, open_bus(server.url, ignorant) as reader:
        await bus.append("log", 0, [Event.of(EpisodeCancelled(reason="no"), source="a/1")])
        await bus.append("log", 1, [note("news")])
        with pytest.raises(UnknownEventTypeError, match=told):
            await reader.read("log")
        async with reader.tail("log") as events:
            await anext(events)
            with pytest.raises(UnknownEventTypeError, match=told):
                await anext(events)


async def test_mail_that_cannot_be_read_stays_while_a_full_server_can_bury_nothing(
    server: PrivateServer, caplog: pytest.LogCaptureFixture
) -> None:
    ignorant = Registry()
    del ignorant.types["message.posted"]
    async with open_bus(server.url) as bus, Redis.from_url(server.url) as admin:
        await bus.send_mail("log", note("news"))
        await admin.config_set("maxmemory", 1)
        async with open_bus(server.url, ignorant) as owner, owner.mailbox("log") as box:
            with anyio.move_on_after(0.3):
                await anext(box)
        assert "mail to log that can't be read is not among the dead" in caplog.text
        await admin.config_set("maxmemory", 0)
        async with bus.mailbox("log") as box:
            (mail,) = await anext(box)
        assert mail.event.data == MessagePosted(content="news")


async def test_control_mail_is_sent_before_calls_that_wait(server: PrivateServer) -> None:
    sent: list[str] = []

    async def put(bus: Bus, text: str) -> None:
        await bus.put("queue", note(text))
        sent.append(text)

    async with open_bus(server.url) as bus, anyio.create_task_group() as tasks:
        for number in range(10 * BATCH_CALLS):
            tasks.start_soon(put, bus, str(number))
        await anyio.lowlevel.checkpoint()  # all of them are called, none is answered
        cancelled = Event.of(EpisodeCancelled(reason="enough"), source="cli/1")
        await bus.send_mail("log", cancelled)
        assert len(sent) <= 3 * BATCH_CALLS
        tasks.cancel_scope.cancel()


async def test_every_key_has_an_owner_or_a_ttl(server: PrivateServer) -> None:
    async with open_bus(server.url) as bus:
        cancelled = Event.of(EpisodeCancelled(reason="enough"), source="cli/1")
        await bus.send_mail("never-there", note("mail to nobody"), cancelled)
        await bus.reply(note("asked"), note("answer to nobody"))
        await bus.send_mail("log", note("early"), cancelled)
        await bus.append("log", 0, [note("a")])
        await bus.unlink("log")
        await bus.restore("log", [note("a").at(1)])
        await bus.unlink("log")
        await bus.send_mail("log", note("late"))
    async with Redis.from_url(server.url, decode_responses=True) as client:
        lasting = [name for name in await client.keys("*") if await client.pttl(name) == -1]
    assert lasting == ["aworld:{0}:feed"]
