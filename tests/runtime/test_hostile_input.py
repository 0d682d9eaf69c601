"""Bytes made to exhaust, confuse or take over whoever reads them: each is a dead letter soon, and the queue flows on."""

from __future__ import annotations

import base64
import json
import pickle  # noqa: TID251 - to show that nothing reads it
import time
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from uuid import uuid4

import anyio
import pytest
from redis.asyncio import Redis

from aworld_runtime.bus import Bus, open_bus
from aworld_runtime.bus.redis.keys import Keys
from aworld_runtime.bus.server import PrivateServer
from aworld_runtime.events import REFUSE_ABOVE, Event, MessagePosted, Registry
from tests.waiting import wait_until

pytestmark = pytest.mark.anyio

SOON_S = 5.0
"""Longest that one of them may keep a reader, on a busy machine."""
MB = 1024 * 1024


def note(text: str = "hello") -> Event:
    return Event.of(MessagePosted(content=text), source="test/1")


def message(**changed: object) -> bytes:
    """A message's JSON, with other fields."""
    return json.dumps(json.loads(Registry().encode(note())) | changed).encode()


def with_content(content: bytes) -> bytes:
    return Registry().encode(note("HERE")).replace(b'"HERE"', content)


def short(number: int) -> str:
    """As many different keys as fit into an event."""
    return base64.b64encode(number.to_bytes(3, "big"), b"-_").decode()


class Evil:
    """Leaves a file behind where somebody unpickles it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.file,)


HOSTILE: dict[str, Callable[[], bytes]] = {
    "zip bomb": lambda: b"z" + zlib.compress(b"[" + b"0," * (32 * MB) + b"0]", 9),
    "zip bomb in a string": lambda: b"z" + zlib.compress(with_content(b'"%b"' % bytes(64 * MB)), 9),
    "cut compression": lambda: b"z" + zlib.compress(bytes(10_000))[:-5],
    "10,000 brackets": lambda: with_content(b"[" * 10_000 + b"]" * 10_000),
    "10,000 braces": lambda: with_content(b'{"a":' * 10_000 + b"1" + b"}" * 10_000),
    "10,000 open brackets": lambda: b"[" * 10_000,
    "900,000 keys": lambda: json.dumps(dict.fromkeys(map(short, range(900_000)), 0), separators=(",", ":")).encode(),
    "not a number": lambda: message(hops=float("nan")),
    "infinity": lambda: message(attempt=float("inf")),
    "a number of a million digits": lambda: with_content(b"9" * MB),
    "a huge exponent": lambda: message().replace(b'"hops"', b'"x"').replace(b"{", b'{"hops": 1e999999,', 1),
    "pickle": lambda: pickle.dumps({"type": "message.posted"}),
    "invalid UTF-8": lambda: with_content(b'"\xff\xfe\xc3\x28"'),
    "half a surrogate pair": lambda: with_content(b'"\\ud800"'),
    "a type of 1 MB": lambda: message(type="x" * MB),
    "a type that is no text": lambda: message(type={"$ref": "message.posted"}),
    "an unknown type": lambda: message(type="system.pwned"),
    "a newer schema": lambda: message(schema_version=99),
    "a forged role": lambda: message(role="worker"),
    "a signature nobody can check": lambda: b"h\x00" + bytes(32) + message(),
    "a blob that isn't there": lambda: b'b{"id":"1","type":"message.posted","data":{"blob":"%b","size":9}}' % (b"0" * 64),
    "above the cap": lambda: b" " * (REFUSE_ABOVE + 1),
    "nothing": lambda: b"",
    "null": lambda: b"null",
    "a list": lambda: b"[1, 2, 3]",
}  # fmt: skip


@pytest.fixture(scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[PrivateServer]:
    async with PrivateServer(tmp_path_factory.mktemp("bus")) as started:
        yield started


@pytest.fixture
def keys() -> Keys:
    return Keys(f"t-{uuid4().hex[:8]}")


@pytest.fixture
async def bus(server: PrivateServer, keys: Keys) -> AsyncIterator[Bus]:
    async with open_bus(f"{server.url}?namespace={keys.namespace}") as opened:
        yield opened


@pytest.fixture
async def redis(server: PrivateServer) -> AsyncIterator[Redis]:
    async with Redis.from_url(server.url) as client:
        yield client


@pytest.mark.parametrize("kind", HOSTILE)
async def test_hostile_work_is_a_dead_letter_and_the_next_is_served(
    bus: Bus, redis: Redis, keys: Keys, kind: str
) -> None:
    await redis.xadd(keys.queue("q").work, {"e": HOSTILE[kind]()})
    await bus.put("q", note("next"))
    began = time.process_time()
    async with bus.consume("q", consumer="c", credit=10) as consumer:
        with anyio.fail_after(2 * SOON_S):
            delivery = await consumer.take()
        assert delivery.event.data == MessagePosted(content="next")
        await delivery.ack()
    assert time.process_time() - began < SOON_S
    (letter,) = await bus.dead_letters("q")
    assert letter.event is None
    assert len(letter.reason) < 1000
    assert await bus.backlog("q") == 0


async def test_hostile_mail_is_a_dead_letter_and_the_next_is_read(
    bus: Bus, redis: Redis, keys: Keys
) -> None:
    kinds = ("zip bomb", "10,000 brackets", "pickle", "invalid UTF-8", "a forged role", "nothing")
    for kind in kinds:
        await redis.xadd(keys.log("log").mail, {"e": HOSTILE[kind]()})
    await bus.send_mail("log", note("next"))
    async with bus.mailbox("log") as box:
        with anyio.fail_after(15):
            (mail,) = await anext(aiter(box))
    assert mail.event.data == MessagePosted(content="next")

    async def all_buried() -> bool:
        return len(await bus.dead_letters("mail")) == len(kinds)

    await wait_until(all_buried, description="a dead letter of each")


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_never_run(tmp_path: Path, protocol: int) -> None:
    file = tmp_path / "pwned"
    body = pickle.dumps(Evil(file), protocol)
    for hostile in (body, b"z" + zlib.compress(body), with_content(body)):
        with pytest.raises(Exception, match="not an event"):
            Registry().decode(hostile)
    assert not file.exists()


def test_of_duplicate_keys_the_type_that_is_checked_is_the_one_that_counts() -> None:
    """What reads quickly and what reads carefully must not see two different events."""
    body = Registry().encode(note())
    twice = body.replace(
        b'"type":"message.posted"', b'"type":"message.posted","type":"episode.finished"'
    )
    assert twice != body
    with pytest.raises(Exception, match="not an event"):
        Registry().decode(twice)


async def test_a_private_server_takes_no_entry_of_500_mb(server: PrivateServer) -> None:
    async with await anyio.connect_tcp("127.0.0.1", server.port or 0) as stream:
        await stream.send(b"*5\r\n$4\r\nXADD\r\n$1\r\nq\r\n$1\r\n*\r\n$1\r\ne\r\n$500000000\r\n")
        with anyio.fail_after(SOON_S):
            assert (await stream.receive()).startswith(b"-ERR Protocol error: invalid bulk length")
