"""Signed events: who has no key writes nothing that anybody reads, and nothing counts elsewhere than where it was written."""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import anyio
import pytest
from redis.asyncio import Redis

from aworld_runtime import Agent, cli
from aworld_runtime.bus import Bus, open_bus
from aworld_runtime.bus.redis.keys import Keys
from aworld_runtime.bus.server import PrivateServer
from aworld_runtime.config import Settings
from aworld_runtime.errors import ConfigError, ForgedEventError
from aworld_runtime.events import Event, MessagePosted, Registry, ToolCalled, ToolReturned
from aworld_runtime.messages import ToolCall
from aworld_runtime.models.scripted import ScriptedModel
from aworld_runtime.names import episode_log, tool_queue
from aworld_runtime.nodes.tool_calls import answer_event
from aworld_runtime.nodes.tool_worker import ToolWorker
from aworld_runtime.signatures import Signer, role_key
from aworld_runtime.tools.base import RemoteTool
from tests.episodes import Adder, owner_of, request_episode
from tests.waiting import wait_until

pytestmark = pytest.mark.anyio

MASTER = "a master key of a test"
OTHER = "another key of the test"


@pytest.fixture(scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[PrivateServer]:
    async with PrivateServer(tmp_path_factory.mktemp("bus")) as started:
        yield started


@pytest.fixture
def url(server: PrivateServer) -> str:
    return f"{server.url}?namespace=t-{uuid4().hex[:8]}"


def note(text: str = "hello", source: str = "test/1") -> Event:
    return Event.of(MessagePosted(content=text), source=source)


async def letter_of(bus: Bus, queue: str) -> str:
    async def there() -> bool:
        return bool(await bus.dead_letters(queue))

    await wait_until(there, description="a dead letter")
    (letter,) = await bus.dead_letters(queue)
    return letter.reason


# --- the bytes -------------------------------------------------------------------------------------------------------


def test_what_is_signed_is_verified_for_its_place_alone() -> None:
    signer = Signer([MASTER])
    signed = signer.sign(b"{}", b"here", role="any")
    assert signer.verify(signed, b"here") == (b"{}", "")
    for body, place in ((signed, b"there"), (signed + b" ", b"here"), (b"{}", b"here")):
        with pytest.raises(ForgedEventError):
            signer.verify(body, place)


def test_the_signature_is_an_hmac_as_others_make_it() -> None:
    key = hmac.digest(hashlib.sha256(MASTER.encode()).digest(), b"aworld-rt role\0", "sha256")
    signed = Signer([MASTER]).sign(b"{}", b"here", role="any")
    assert signed == b"h\0" + hmac.digest(key, b"here{}", "sha256") + b"{}"


def test_no_prefix_of_a_signed_body_is_more_than_refused() -> None:
    signed = Signer([MASTER]).sign(b"{}", b"here", role="any")
    for end in range(len(signed)):
        with pytest.raises(ForgedEventError):
            Signer([MASTER]).verify(signed[:end], b"here")


def test_the_first_key_signs_and_all_verify() -> None:
    old, both, new = Signer([OTHER]), Signer([MASTER, OTHER]), Signer([MASTER])
    assert both.verify(old.sign(b"{}", b"p", role="r"), b"p") == (b"{}", "")
    assert new.verify(both.sign(b"{}", b"p", role="r"), b"p") == (b"{}", "")
    with pytest.raises(ForgedEventError):
        new.verify(old.sign(b"{}", b"p", role="r"), b"p")


def test_a_roles_key_signs_as_this_role_alone() -> None:
    master, tool = Signer([MASTER]), Signer([role_key(MASTER, "add")])
    assert master.verify(tool.sign(b"{}", b"p", role="add"), b"p") == (b"{}", "add")
    assert tool.verify(master.sign(b"{}", b"p", role="solver", reader="add"), b"p") == (
        b"{}",
        "add",
    )
    with pytest.raises(ForgedEventError, match="no key to sign as role 'solver'"):
        tool.sign(b"{}", b"p", role="solver")
    with pytest.raises(ForgedEventError):
        tool.verify(master.sign(b"{}", b"p", role="solver"), b"p")


@pytest.mark.parametrize(
    "key", ["short", "role:add:00", "role::" + "0" * 64, "role:add:" + "x" * 64]
)
def test_a_key_that_is_none_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        open_bus("redis://h", keys=[key])
    assert key not in str(refused.value)


# --- on a bus --------------------------------------------------------------------------------------------------------


async def test_unsigned_work_is_a_dead_letter_and_the_queue_flows_on(url: str) -> None:
    async with open_bus(url) as stranger, open_bus(url, keys=[MASTER]) as bus:
        await stranger.put("q", note("forged"))
        await bus.put("q", note("true"))
        async with bus.consume("q", consumer="c") as consumer:
            with anyio.fail_after(5):
                delivery = await consumer.take()
            assert delivery.event.data == MessagePosted(content="true")
            await delivery.ack()
        assert "ForgedEventError: it is not signed" in await letter_of(bus, "q")


async def test_unsigned_mail_is_a_dead_letter(url: str) -> None:
    async with open_bus(url) as stranger, open_bus(url, keys=[MASTER]) as bus:
        await stranger.send_mail("log", note("forged"))
        await bus.send_mail("log", note("true"))
        async with bus.mailbox("log") as box:
            with anyio.fail_after(5):
                (mail,) = await anext(aiter(box))
        assert mail.event.data == MessagePosted(content="true")
        assert "ForgedEventError: it is not signed" in await letter_of(bus, "mail")


async def test_an_entry_of_a_log_that_was_written_over_moved_or_copied_is_named(url: str) -> None:
    keys = Keys(url.partition("namespace=")[2])
    async with open_bus(url, keys=[MASTER]) as bus, Redis.from_url(url.partition("?")[0]) as redis:
        for seq, text in enumerate(("one", "two")):
            await bus.append("log", seq, [note(text)])
        await bus.append("other", 0, [note("three")])
        entries = cast("list[tuple[bytes, Any]]", await redis.xrange(keys.log("log").log))
        first = entries[0][1]
        for log, seq in (("log", 3), ("other", 2)):  # elsewhere in its log; in another log
            await redis.xadd(keys.log(log).log, first, id=f"{seq}-0")
            assert [e.seq for e in await bus.read(log, limit=seq - 1)] == [*range(1, seq)]
            with pytest.raises(ForgedEventError, match=f"log '{log}', seq {seq}: its signature"):
                await bus.read(log)
            async with bus.tail(log, seq) as tail:
                with pytest.raises(ForgedEventError, match=f"log '{log}', seq {seq}"):
                    await anext(aiter(tail))
        await redis.xadd(keys.log("new").log, {"e": Registry().encode(note())}, id="1-0")
        with pytest.raises(ForgedEventError, match="log 'new', seq 1: it is not signed"):
            await bus.read("new")


async def test_large_content_is_signed_by_its_name(url: str) -> None:
    keys = Keys(url.partition("namespace=")[2])
    large = note("x" * 200_000)
    async with open_bus(url, keys=[MASTER]) as bus, Redis.from_url(url.partition("?")[0]) as redis:
        await bus.append("log", 0, [large])
        assert await bus.read("log") == [large.at(1)]
        for name in await redis.hkeys(keys.log("log").blobs):
            await redis.hset(keys.log("log").blobs, name, "forged")
        with pytest.raises(Exception, match="is damaged"):
            await bus.read("log")


async def test_who_has_no_key_is_told_so(url: str) -> None:
    async with open_bus(url) as bare, open_bus(url, keys=[MASTER]) as bus:
        await bus.append("log", 0, [note()])
        with pytest.raises(
            ForgedEventError, match="seq 1: it is signed, and this process has no key"
        ):
            await bare.read("log")


async def test_requests_and_replies_are_signed(url: str) -> None:
    async with open_bus(url, keys=[MASTER]) as bus, anyio.create_task_group() as tasks:

        async def serve() -> None:
            async with bus.consume("echo", consumer="c") as consumer:
                delivery = await consumer.take()
                await bus.reply(delivery.event, note("yes"))
                await delivery.ack()

        tasks.start_soon(serve)
        answer = await bus.request("echo", note("hello?"), timeout_s=5)
        assert answer.data == MessagePosted(content="yes")


async def test_a_dead_letter_is_requeued_with_its_signature(url: str) -> None:
    async with open_bus(url, keys=[MASTER]) as bus:
        await bus.put("q", note("again"))
        async with bus.consume("q", consumer="c") as consumer:
            await (await consumer.take()).dead_letter("no")
            (letter,) = await bus.dead_letters("q")
            assert letter.event is not None
            await bus.requeue("q", letter.id)
            assert (await consumer.take()).event == letter.event


# --- roles -----------------------------------------------------------------------------------------------------------


def remote_program() -> Agent:
    remote = RemoteTool(Adder().get_schema(), timeout_s=5)
    model = ScriptedModel([ToolCall(id="c1", name="add", arguments={"a": 2, "b": 3}), "five"])
    return Agent("solver", llm=model, tools=[remote])


async def test_a_tool_with_its_roles_key_alone_serves_an_owner(url: str) -> None:
    events: list[Event] = []
    async with (
        open_bus(url, keys=[MASTER]) as bus,
        open_bus(url, keys=[role_key(MASTER, "add")]) as tools,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(ToolWorker(tools, {"add": Adder()}, name="t").run)
        owner = owner_of(bus, request_episode(), remote_program().program())
        with anyio.fail_after(10):
            await owner.run()
        events += owner.events
        tasks.cancel_scope.cancel()
    answers = [e for e in events if isinstance(e.data, ToolReturned)]
    assert [(e.source, e.data) for e in answers] == [("add/t", ToolReturned(name="add", content=5))]


async def test_a_roles_key_signs_no_other_role_and_no_log(url: str) -> None:
    call = ToolCalled(call=ToolCall(id="c", name="other"))
    called = note(source="solver/w").caused(call, source="solver/w")
    answer = answer_event(called, ToolReturned(name="other", content=1), source="other/x")
    log = episode_log("e")
    async with (
        open_bus(url, keys=[MASTER]) as bus,
        open_bus(url, keys=[role_key(MASTER, "add")]) as tool,
    ):
        with pytest.raises(ForgedEventError, match="no key to sign as role 'other'"):
            await tool.send_mail(log, answer)
        await tool.append(log, 0, [note(source="add/t")])
        with pytest.raises(ForgedEventError, match="signed as role 'add', which owns no log"):
            await bus.read(log)
        await bus.put(tool_queue("other"), called)
        async with tool.consume(tool_queue("other"), consumer="c"):
            pass  # its access list forbids it; without one, what it could take it could not read


async def test_a_forged_role_is_refused_even_where_its_bytes_are_signed(url: str) -> None:
    """Whoever has the key of `add` can write what he likes with it, but not in another's name."""
    namespace = url.partition("namespace=")[2]
    event = note(source="other/x")
    place = f"{namespace}\0mail:log\0".encode()
    signer = Signer([role_key(MASTER, "add")])
    forged = signer.sign(Registry().encode(event), place, role="add")
    async with open_bus(url, keys=[MASTER]) as bus, Redis.from_url(url.partition("?")[0]) as redis:
        await redis.xadd(Keys(namespace).log("log").mail, {"e": forged})
        async with bus.mailbox("log") as box, anyio.create_task_group() as tasks:

            async def read() -> None:
                await anext(box)

            tasks.start_soon(read)
            assert "of role 'other' is signed as role 'add'" in await letter_of(bus, "mail")
            tasks.cancel_scope.cancel()


# --- settings --------------------------------------------------------------------------------------------------------


def test_keys_come_from_the_environment_and_a_file_and_are_never_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{OTHER.replace(' ', '-')}\n")
    monkeypatch.setenv("AWORLD_BUS_KEY", "first-of-the-keys,second-of-the-keys")
    monkeypatch.setenv("AWORLD_BUS_KEY_FILE", str(file))
    settings = Settings.from_env()
    assert settings.bus_keys == (
        "first-of-the-keys", "second-of-the-keys", "another-key-of-the-test"
    )  # fmt: skip
    with caplog.at_level(logging.DEBUG):
        shown = f"{settings!r} {settings.model_dump_json()}"
    assert "of-the-keys" not in shown + caplog.text
    file.unlink()
    with pytest.raises(ConfigError, match="AWORLD_BUS_KEY_FILE"):
        _ = settings.bus_keys


def test_aworld_acl_gives_a_tool_a_key_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    master = "a-master-key-of-a-test"
    monkeypatch.setenv("AWORLD_BUS_KEY", master)
    assert cli.main(["acl", "--role", "worker", "--role", "tool:add"]) == 0
    err = capsys.readouterr().err
    assert role_key(master, "add") in err
    assert master not in err
