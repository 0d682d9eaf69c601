"""Access lists: each role works with the rights that `aworld acl` gives it, and has no others."""

from __future__ import annotations

import inspect
import json
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import cast
from urllib.parse import quote

import anyio
import pytest
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, ResponseError

from aworld_runtime import Agent, cli
from aworld_runtime.archive.archiver import Archiver
from aworld_runtime.archive.janitor import Janitor
from aworld_runtime.archive.lost import put_back, say_restored
from aworld_runtime.bus import Bus, open_bus
from aworld_runtime.bus.redis.acl import ROLES, acl_file, users
from aworld_runtime.bus.redis.keys import Keys, Patterns
from aworld_runtime.bus.server import PrivateServer
from aworld_runtime.errors import AccessDeniedError, ConfigError
from aworld_runtime.events import (
    EpisodeFinished,
    EpisodeRequested,
    Event,
    MessagePosted,
    ToolReturned,
)
from aworld_runtime.messages import Task, ToolCall
from aworld_runtime.models.scripted import ScriptedModel
from aworld_runtime.names import EPISODES_QUEUE, episode_log, tool_queue
from aworld_runtime.nodes.tool_worker import ToolWorker
from aworld_runtime.nodes.worker import Worker
from aworld_runtime.processes import spawn
from aworld_runtime.store.open import open_store
from aworld_runtime.tools.base import RemoteTool
from tests.episodes import Adder
from tests.waiting import wait_until

pytestmark = pytest.mark.anyio

NAMESPACE = "guarded"
TOOL = "tool:add"
ALL_ROLES = [*ROLES, TOOL]
As = Callable[[str], str]


@pytest.fixture(scope="module")
async def as_role(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[As]:
    """A server with a user for each role: gives the URL of a role's."""
    folder = tmp_path_factory.mktemp("guarded")
    made = {user.role: user for user in users(NAMESPACE, ALL_ROLES)}
    # The private server is asked whether it is ready, without a password.
    text = acl_file(made.values()).replace("user default off", "user default on nopass", 1)
    file = folder / "users.acl"
    file.write_text(text.replace("-@all\n", "-@all +info\n", 1))
    async with PrivateServer(folder, options={"aclfile": str(file)}) as server:

        def url(role: str) -> str:
            user = made[role]
            login = f"{quote(user.name)}:{quote(user.password)}"
            return f"redis://{login}@127.0.0.1:{server.port}/0?namespace={NAMESPACE}"

        yield url


@pytest.fixture
async def client(as_role: As) -> AsyncIterator[Callable[[str], Redis]]:
    """Gives a bare client of a role's user."""
    clients = {role: Redis.from_url(as_role(role).partition("?")[0]) for role in ALL_ROLES}
    yield clients.__getitem__
    for one in clients.values():
        await one.aclose()


def note(text: str = "hello") -> Event:
    return Event.of(MessagePosted(content=text), source="test/1")


async def test_an_episode_runs_with_every_node_under_its_own_user(
    as_role: As, tmp_path: Path
) -> None:
    remote = RemoteTool(Adder().get_schema(), timeout_s=5)
    model = ScriptedModel([ToolCall(id="c1", name="add", arguments={"a": 2, "b": 3}), "five"])
    programs = {"local:adding": Agent("solver", llm=model, tools=[remote])}
    requested = Event.of(
        EpisodeRequested(task=Task(id="t", prompt="2 + 3?"), program="local:adding"),
        source="trainer/1",
        run_id="r",
        episode_id="e",
    )
    async with (
        open_bus(as_role("worker")) as workers,
        open_bus(as_role(TOOL)) as tools,
        open_bus(as_role("archiver")) as archivers,
        open_bus(as_role("trainer")) as trainer,
        open_bus(as_role("observer")) as observer,
        open_store(f"sqlite:///{tmp_path}/store.db") as store,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(Worker(workers, name="w", slots=1, programs=programs).run)
        tasks.start_soon(ToolWorker(tools, {"add": Adder()}, name="t").run)
        tasks.start_soon(Archiver(archivers, store).run)
        await trainer.put(EPISODES_QUEUE, requested)
        with anyio.fail_after(10):
            async with observer.tail(episode_log("e")) as log:
                async for event in log:
                    if event.type == "episode.finished":
                        break
        there = await observer.read(episode_log("e"))
        assert [e.data for e in there if isinstance(e.data, ToolReturned)] == [
            ToolReturned(name="add", content=5)
        ]

        async def settled() -> bool:
            return await observer.backlog(EPISODES_QUEUE) == 0

        await wait_until(settled, description="an empty queue")
        names = {node.name for node in await observer.nodes()}
        assert {"worker/w", "add/t"} <= names
        async with trainer.mailbox("run:r") as mail:
            (finished,) = await anext(mail)
            assert finished.event.type == "episode.finished"

        async def archived() -> bool:
            return bool(await store.read(episode_log("e")))

        await wait_until(archived, description="the log in the store")
        tasks.cancel_scope.cancel()


async def test_a_process_that_serves_tools_alone_needs_no_more_than_a_tools_user(
    as_role: As, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("from tests.episodes import Adder\ntools = [Adder()]\n")
    served = ["--slots", "0", "--tools", "mine:tools", "--name", "alone"]
    argv = [sys.executable, "-m", "aworld_runtime.cli", "worker", *served, "--bus", as_role(TOOL)]
    root = str(Path(__file__).parents[2])
    process = await spawn(argv, log=tmp_path / "log", cwd=tmp_path, env={"PYTHONPATH": root})
    try:
        async with open_bus(as_role("observer")) as bus:

            async def is_there() -> bool:
                return "add/alone" in {node.name for node in await bus.nodes()}

            await wait_until(is_there, 20, description="the tool's worker")
            process.send_signal(signal.SIGTERM)
            assert await process.wait(deadline=10) == 0
            assert not await is_there()
    finally:
        await process.stop(grace=0)


async def test_an_archiver_and_its_janitor_need_no_more_than_an_archivers_user(
    as_role: As, tmp_path: Path
) -> None:
    ended = Event.of(EpisodeFinished(answer="x" * 100_000), source="worker/w", episode_id="over")
    lost = Event.of(
        EpisodeRequested(task=Task(id="t", prompt="?"), program="m:a"), source="r/1", episode_id="l"
    )
    async with (
        open_bus(as_role("archiver")) as bus,
        open_bus(as_role("worker")) as workers,
        open_store(f"sqlite:///{tmp_path}/store.db") as store,
        Archiver(bus, store) as archiver,
        anyio.create_task_group() as tasks,
    ):
        janitor = Janitor(bus, store, archiver, retire_after_s=0, restore_after_s=6)
        tasks.start_soon(janitor.run)
        await workers.append(episode_log("over"), 0, [note(), ended])
        await archiver.drain()

        async def is_retired() -> bool:
            return len(await bus.read(episode_log("over"))) == 1

        await wait_until(is_retired, description="the log that is over freed")
        assert (await bus.read(episode_log("over")))[0].data == ended.data
        # As where the server has lost an episode.
        known = [lost.at(1), note().at(2)]
        assert await put_back(bus, episode_log("l"), known) == 2
        assert await say_restored(bus, episode_log("l"), 2, lost, source="janitor/a")
        await bus.put(EPISODES_QUEUE, lost)
        async with workers.consume(EPISODES_QUEUE, consumer="w") as consumer:
            await (await consumer.take()).ack()
        tasks.cancel_scope.cancel()


async def take(bus: Bus, queue: str) -> None:
    async with bus.consume(queue, consumer="c") as consumer:
        await consumer.take()


async def listen(bus: Bus, channel: str) -> None:
    async with bus.listen(channel) as heard:
        await anext(heard)


async def follow(bus: Bus) -> None:
    async with bus.feed() as feed:
        await anext(feed)


Deed = Callable[[Bus], Awaitable[object]]
FORBIDDEN: dict[str, tuple[Sequence[str], Deed]] = {
    "append": (
        (TOOL, "operator", "observer"),
        lambda bus: bus.append("log", 0, [note()]),
    ),
    "restore a log": (
        (TOOL, "operator", "observer"),
        lambda bus: bus.restore("log", [note().at(1)]),
    ),
    "free a log": (
        (TOOL, "operator", "observer", "worker"),
        lambda bus: bus.unlink("log"),
    ),
    "read a log": ((TOOL,), lambda bus: bus.read("log")),
    "follow the feed": ((TOOL, "worker"), follow),
    "trim the feed": (
        (TOOL, "operator", "observer", "worker"),
        lambda bus: bus.trim_feed("1-1"),
    ),
    "request an episode": (
        (TOOL, "operator", "observer"),
        lambda bus: bus.put(EPISODES_QUEUE, note()),
    ),
    "take an episode": (
        (TOOL, "archiver", "operator", "observer"),
        lambda bus: take(bus, EPISODES_QUEUE),
    ),
    "take another tool's call": (
        (TOOL, "archiver", "operator", "observer", "worker"),
        lambda bus: take(bus, tool_queue("other")),
    ),
    "send mail": (("archiver", "observer"), lambda bus: bus.send_mail("log", note())),
    "report to a run": ((TOOL,), lambda bus: bus.send_mail("run:r", note())),
    "broadcast": (
        (TOOL, "archiver", "operator", "observer"),
        lambda bus: bus.broadcast("channel", "x"),
    ),
    "listen": ((TOOL, "archiver"), lambda bus: listen(bus, "channel")),
}


@pytest.mark.parametrize("deed", FORBIDDEN)
async def test_a_role_is_refused_what_it_has_no_need_of(as_role: As, deed: str) -> None:
    """At once, and not as an outage: the error names the user."""
    roles, attempt = FORBIDDEN[deed]
    for role in roles:
        async with open_bus(as_role(role)) as bus:
            with anyio.fail_after(3), pytest.raises(AccessDeniedError) as refused:
                await attempt(bus)
        name = f"{NAMESPACE}-{role.replace(':', '-')}"
        assert f"user '{name}' may not do this" in str(refused.value)
        assert "password" not in str(refused.value)


ADMINISTRATION = (
    "FLUSHALL", "FLUSHDB", "CONFIG GET *", "KEYS *", "SCRIPT FLUSH", "ACL LIST", "SHUTDOWN",
    "MONITOR", "CLIENT KILL ID 1", "CLIENT LIST", "SCAN 0", "RANDOMKEY", "MODULE LIST", "REPLICAOF NO ONE",
    "SAVE", "FUNCTION LIST", "SWAPDB 0 1", "MIGRATE h 1 k 0 1", "SUBSCRIBE other:channel", "GET other:key",
)  # fmt: skip


@pytest.mark.parametrize("role", ALL_ROLES)
async def test_nobody_administers_the_server_or_leaves_the_namespace(
    client: Callable[[str], Redis], role: str
) -> None:
    for command in ADMINISTRATION:
        with pytest.raises(NoPermissionError):
            await client(role).execute_command(*command.split())


async def test_a_script_has_no_more_rights_than_its_caller(
    client: Callable[[str], Redis],
) -> None:
    keys = Keys(NAMESPACE).log("log")
    evil = "return redis.call('XADD', KEYS[1], '1-0', 'e', 'forged')"
    sha = await client(TOOL).script_load(evil)
    with pytest.raises(ResponseError):
        await client(TOOL).evalsha(sha, 1, keys.log.decode())
    assert await client("observer").xlen(keys.log.decode()) == 0


async def test_who_gives_no_password_may_do_nothing(as_role: As) -> None:
    anonymous = "redis://" + as_role("worker").partition("@")[2]
    with anyio.fail_after(3), pytest.raises(ConfigError, match="user 'default' may not do this"):
        async with open_bus(anonymous):
            pass


async def test_a_wrong_password_is_no_outage(as_role: As) -> None:
    wrong = as_role("worker").replace("worker:", "worker:x")
    with anyio.fail_after(3), pytest.raises(ConfigError, match="check user and password"):
        async with open_bus(wrong):
            pass


def every_key() -> Iterator[tuple[str, bytes]]:
    """What `Keys` makes, whichever it is: a key that is added to it later, too."""
    keys = Keys(NAMESPACE, shards=64)
    for name, member in inspect.getmembers(Keys):
        if name.startswith("_") or name in ("namespace", "shards", "shard_of"):
            continue
        made = getattr(keys, name)
        if callable(made):
            made = made(*["x:y"] * (len(inspect.signature(member).parameters) - 1))
        some = [made] if isinstance(made, bytes) else cast("Sequence[bytes]", made)
        yield from ((name, key) for key in some)


def test_the_trainer_has_every_key_there_is() -> None:
    (trainer,) = users(NAMESPACE, ["trainer"])
    allowed = [pattern.decode() for rule in trainer.rules for pattern in rule.both]
    channels = [pattern.decode() for rule in trainer.rules for pattern in rule.channels]
    found = list(every_key())
    assert len(found) > 10
    for name, key in found:
        among = channels if name in ("broadcast", "logs") else allowed
        assert any(fnmatchcase(key.decode(), pattern) for pattern in among), (name, key)


def test_patterns_name_every_key_that_a_method_makes() -> None:
    keys, patterns = Keys("n", shards=64), Patterns("n")
    for made, pattern in zip(keys.log("episode:1"), patterns.log("*"), strict=True):
        assert fnmatchcase(made.decode(), pattern.decode())
    assert not fnmatchcase("n:{q:episodes}:work", patterns.log("*").log.decode())


# --- aworld acl ------------------------------------------------------------------------------------------------------


def test_aworld_acl_writes_hashes_to_a_file_of_its_owner_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "users.acl"
    arguments = ["acl", "--namespace", "n", "--role", "worker", "--role", "tool:a", "-o", str(file)]
    assert cli.main([*arguments, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert [user["user"] for user in made["users"]] == ["n-worker", "n-tool-a"]
    assert file.stat().st_mode & 0o777 == 0o600
    text = file.read_text()
    assert text.startswith("user default off")
    assert not any(user["password"] in text for user in made["users"])
    assert cli.main(arguments) == 2
    assert "name a new file" in capsys.readouterr().err
    assert file.read_text() == text


def test_aworld_acl_prints_the_list_and_apart_from_it_the_passwords(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["acl"]) == 0
    out, err = capsys.readouterr()
    assert [line.split()[1] for line in out.splitlines()] == [
        "default",
        *(f"aworld-{r}" for r in ROLES),
    ]
    assert [line.split()[0] for line in err.splitlines()] == ["ROLE", *ROLES]


@pytest.mark.parametrize("role", ["boss", "tool:", "tool:a b", "tool:*"])
def test_a_role_that_is_none_is_named(role: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["acl", "--role", role]) == 2
    assert f"role={role!r}: use worker, trainer" in capsys.readouterr().err
