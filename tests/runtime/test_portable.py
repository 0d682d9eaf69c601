"""An episode or a run as one file: a full copy, all of it or nothing, whatever happened to the file."""

import hashlib
import json
import sqlite3
import sys
import zipfile
from collections.abc import AsyncIterator, Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import JsonValue

from aworld_runtime.archive.records import advance
from aworld_runtime.archive.verify import compare
from aworld_runtime.bus.open import open_bus
from aworld_runtime.errors import (
    ConfigError,
    DamagedFileError,
    LogRewoundError,
    MissingBlobError,
    MissingParentError,
    NotFoundError,
    StoreError,
    UnknownEventTypeError,
)
from aworld_runtime.events import (
    EpisodeFinished,
    EpisodeForked,
    EpisodeRequested,
    Event,
    EventData,
    MessagePosted,
    Registry,
    RunFinished,
    RunStarted,
    StepFinished,
)
from aworld_runtime.messages import Task
from aworld_runtime.names import episode_log, run_log
from aworld_runtime.replay.export import export
from aworld_runtime.replay.exported import ExportedFile
from aworld_runtime.replay.importing import put_into
from aworld_runtime.replay.portable import BLOBS, MANIFEST, ROLLOUTS, Manifest, log_member
from aworld_runtime.store import EpisodeRecord, RolloutRow, Store, open_store

LARGE = "large " * 20_000
RUN = run_log("r1")
ONE, TWO = episode_log("one"), episode_log("two")


class SealBroken(EventData):
    """A user's own."""

    type = "seal.broken"
    seal: str


PROGRAM = """
from aworld_runtime.events import EventData
class SealBroken(EventData):
    type = "seal.broken"
    seal: str
program = None
"""


def event(data: EventData, seq: int, episode: str | None = None, *, run: str = "r1") -> Event:
    made = Event.of(data, source="user/1", run_id=run, episode_id=episode, task_id="t1")
    return made.at(seq)


def requested() -> EpisodeRequested:
    return EpisodeRequested(task=Task(id="t1", prompt="Why?"), program="local:test")


def an_episode(name: str, *, length: int = 6, run: str = "r1") -> list[Event]:
    begin: list[EventData] = [requested(), MessagePosted(content=LARGE), SealBroken(seal="red")]
    middle = [MessagePosted(content=f"{name} {n}") for n in range(length - 4)]
    data = [*begin, *middle, EpisodeFinished(answer=name)]
    return [event(one, seq, name, run=run) for seq, one in enumerate(data, 1)]


async def keep(store: Store, name: str, events: list[Event]) -> None:
    """As the archiver does."""
    await store.put_events(episode_log(name), events)
    record = EpisodeRecord(id=name)
    for each in events:
        record = advance(record, each)
    await store.put_episode(record.model_copy(update={"feed": "f1"}))


def row(number: int) -> RolloutRow:
    return RolloutRow(
        id=f"one/solver/{number:03}",
        run_id="r1",
        group_id="g1",
        episode_id="one",
        role="solver",
        token_ids=(1, 2),
        loss_mask=(False, True),
        behavior_logprobs=(-0.5, -0.25),
        policy="p",
        policy_version=1,
        reward=1.0,
    )


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    """A run of two episodes, the second longer than a page."""
    async with open_store(f"sqlite:///{tmp_path}/recorded.db") as opened:
        await keep(opened, "one", an_episode("one"))
        await keep(opened, "two", an_episode("two", length=600))
        log = [RunStarted(kind="train"), StepFinished(step=1, metrics={"loss": 0.5})]
        await opened.put_events(RUN, [event(data, n) for n, data in enumerate(log, 1)])
        await opened.put_events(RUN, [event(RunFinished(reason="done"), 3)])
        await opened.put_rollouts([row(number) for number in range(70)])
        yield opened


@pytest.fixture
async def empty(tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store(f"sqlite:///{tmp_path}/empty.db") as opened:
        yield opened


async def import_file(
    path: Path, store: Store, registry: Registry | None = None, tell: Callable[[int], object] = int
) -> int:
    with ExportedFile(path, registry or Registry()) as exported:
        await exported.check()
        return await put_into(store, exported, tell)


def content(store: Store) -> list[str]:
    """All that is in a SQLite store."""
    path = store.url.removeprefix("sqlite:///")
    with closing(sqlite3.connect(path)) as database:
        return list(database.iterdump())


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- what is in it -------------------------------------------------------------------------------------------------


async def test_an_imported_run_is_a_full_copy(store: Store, empty: Store, tmp_path: Path) -> None:
    file = tmp_path / "r1.zip"
    manifest = await export(store, RUN, file)
    assert (manifest.kind, manifest.id, manifest.events) == ("run", "r1", 609)
    assert await import_file(file, empty) == 609
    assert await empty.logs() == [ONE, TWO, RUN]
    for log in await store.logs():
        assert await empty.read(log) == await store.read(log)
    for name in ("one", "two"):
        kept, expected = await empty.episode(name), await store.episode(name)
        assert expected is not None
        assert kept == expected.model_copy(update={"feed": None})
    (run,) = await empty.runs()
    assert (run.id, run.kind, run.reason) == ("r1", "train", "done")
    assert await empty.metrics("r1") == [(1, {"loss": 0.5})]
    assert [r async for r in empty.rollouts("r1")] == [r async for r in store.rollouts("r1")]


async def test_every_event_is_a_line_of_json_and_large_content_stands_apart_once(
    store: Store, tmp_path: Path
) -> None:
    manifest = await export(store, RUN, tmp_path / "r1.zip")
    with zipfile.ZipFile(tmp_path / "r1.zip") as archive:
        lines = [json.loads(line) for line in archive.read(log_member(ONE)).splitlines()]
        (blob,) = (name for name in archive.namelist() if name.startswith(BLOBS))
        data = archive.read(blob)
        whole = {name: archive.read(name) for name in manifest.members}
    assert [line["seq"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[3]["data"] == {"content": "one 0"}
    assert BLOBS + lines[1]["blob"] == blob
    assert "data" not in lines[1]
    assert json.loads(data) == {"content": LARGE}
    assert set(whole) == {log_member(ONE), log_member(TWO), log_member(RUN), blob, ROLLOUTS}
    for name, member in manifest.members.items():
        assert member.size == len(whole[name])
        assert member.sha256 == hashlib.sha256(whole[name]).hexdigest()


async def test_an_episode_alone_is_exported_without_its_run(
    store: Store, empty: Store, tmp_path: Path
) -> None:
    await export(store, ONE, tmp_path / "one.zip")
    await import_file(tmp_path / "one.zip", empty)
    assert await empty.logs() == [ONE]
    assert await empty.runs() == []


async def test_a_fork_brings_what_it_shares_and_the_parent_is_no_episode_until_it_is_imported(
    store: Store, empty: Store, tmp_path: Path
) -> None:
    """A fork of a fork, of which the second begins before the first does."""
    forks = {"three": (TWO, 500), "four": (episode_log("three"), 400)}
    for name, (parent, at) in forks.items():
        data = [EpisodeForked(parent=parent, at=at), requested(), EpisodeFinished(answer=name)]
        await keep(store, name, [event(one, seq, name) for seq, one in enumerate(data, at + 1)])
    manifest = await export(store, episode_log("four"), tmp_path / "four.zip")
    spans = {log: (span.first, span.last, span.prefix) for log, span in manifest.logs.items()}
    assert spans == {
        TWO: (1, 500, True),
        episode_log("three"): (501, 501, True),
        episode_log("four"): (401, 403, False),
    }
    await import_file(tmp_path / "four.zip", empty)
    assert [episode.id for episode in await empty.episodes()] == ["four"]
    assert await empty.read(TWO) == (await store.read(TWO))[:500]
    async with open_bus("memory://") as bus:
        assert (await compare(bus, empty)).unfinished == ()
    await export(store, TWO, tmp_path / "two.zip")
    assert await import_file(tmp_path / "two.zip", empty) == 100
    assert {episode.id for episode in await empty.episodes()} == {"four", "two"}
    before = content(empty)
    assert await import_file(tmp_path / "four.zip", empty) == 0
    assert content(empty) == before


async def test_a_fork_without_its_parent_is_not_exported(store: Store, tmp_path: Path) -> None:
    forked = EpisodeForked(parent=episode_log("gone"), at=7)
    await keep(store, "three", [event(forked, 8, "three")])
    with pytest.raises(MissingParentError, match="lacks events of episode:gone up to 7"):
        await export(store, episode_log("three"), tmp_path / "three.zip")
    assert not [name for name in names_in(tmp_path) if "zip" in name]


# --- written whole or not at all -----------------------------------------------------------------------------------


async def test_a_file_that_is_there_is_kept_unless_it_may_be_overwritten(
    store: Store, tmp_path: Path
) -> None:
    file = tmp_path / "one.zip"
    file.write_text("mine")
    with pytest.raises(ConfigError, match=r"one.zip is there: .*--force"):
        await export(store, ONE, file)
    assert file.read_text() == "mine"
    await export(store, ONE, file, force=True)
    assert zipfile.is_zipfile(file)


async def test_an_export_that_fails_leaves_nothing(store: Store, tmp_path: Path) -> None:
    await store.put_events(TWO, [event(MessagePosted(content=""), 900)])
    file = tmp_path / "r1.zip"
    file.write_text("the old one")
    before = names_in(tmp_path)
    with pytest.raises(StoreError, match="lacks events 601 to 899 of episode:two"):
        await export(store, RUN, file, force=True)
    with pytest.raises(ConfigError, match="can't be written: Not a directory"):
        await export(store, ONE, file / "one.zip")
    with pytest.raises(NotFoundError, match="no events of episode:none"):
        await export(store, episode_log("none"), file, force=True)
    assert file.read_text() == "the old one"
    assert names_in(tmp_path) == before


# --- imported once more, or half -----------------------------------------------------------------------------------


async def test_the_same_again_changes_nothing_not_even_where_it_came_from(
    store: Store, empty: Store, tmp_path: Path
) -> None:
    await export(store, RUN, tmp_path / "r1.zip")
    recorded = await store.episode("one")
    await import_file(tmp_path / "r1.zip", store)
    assert await store.episode("one") == recorded
    await import_file(tmp_path / "r1.zip", empty)
    before = content(empty)
    assert await import_file(tmp_path / "r1.zip", empty) == 0
    assert content(empty) == before


async def test_large_content_that_the_store_has_lost_is_put_back(
    store: Store, empty: Store, tmp_path: Path
) -> None:
    await export(store, RUN, tmp_path / "r1.zip")
    await import_file(tmp_path / "r1.zip", empty)
    with closing(sqlite3.connect(empty.url.removeprefix("sqlite:///"))) as database, database:
        database.execute("DELETE FROM blobs")
    with pytest.raises(MissingBlobError):
        await empty.read(ONE)
    assert await import_file(tmp_path / "r1.zip", empty) == 0
    for log in (ONE, TWO):
        assert await empty.read(log) == await store.read(log)


async def test_an_import_that_was_interrupted_shows_no_half_episode_and_is_completed(
    store: Store, empty: Store, tmp_path: Path
) -> None:
    await export(store, RUN, tmp_path / "r1.zip")
    with anyio.CancelScope() as scope:
        await import_file(
            tmp_path / "r1.zip", empty, tell=lambda events: events > 100 and scope.cancel()
        )
    assert 0 < await empty.last_seq(TWO) < 600
    assert [episode.id for episode in await empty.episodes()] == ["one"]
    assert await empty.runs() == []
    await import_file(tmp_path / "r1.zip", empty)
    assert await empty.read(TWO) == await store.read(TWO)
    assert {episode.id for episode in await empty.episodes()} == {"one", "two"}
    assert len(await empty.runs()) == 1


async def test_a_later_export_completes_what_an_earlier_one_brought(
    store: Store, empty: Store, tmp_path: Path
) -> None:
    events = an_episode("three")
    await keep(store, "three", events[:4])
    await export(store, episode_log("three"), tmp_path / "early.zip")
    await keep(store, "three", events)
    await export(store, episode_log("three"), tmp_path / "late.zip")
    await import_file(tmp_path / "early.zip", empty)
    await import_file(tmp_path / "late.zip", empty)
    await import_file(tmp_path / "early.zip", empty)
    assert await empty.read(episode_log("three")) == events
    record = await empty.episode("three")
    assert record is not None
    assert record.answer == "three"


async def test_a_log_that_is_another_there_is_refused_and_nothing_is_changed(
    store: Store, empty: Store, tmp_path: Path
) -> None:
    await export(store, RUN, tmp_path / "r1.zip")
    await keep(empty, "two", an_episode("two"))
    before = content(empty)
    with pytest.raises(LogRewoundError, match=r"another episode:two: event 1 is .* Nothing was"):
        await import_file(tmp_path / "r1.zip", empty)
    assert content(empty) == before


async def test_two_processes_import_into_one_file_at_once(tmp_path: Path) -> None:
    """Two runs, into a store that isn't there yet."""
    (tmp_path / "mine.py").write_text(PROGRAM)
    for run in ("a", "b"):
        async with open_store(f"sqlite:///{tmp_path}/{run}.db") as store:
            for number in range(20):
                await keep(store, f"{run}-{number}", an_episode(f"{run}-{number}", run=run))
            await store.put_events(run_log(run), [event(RunStarted(kind="run"), 1, run=run)])
            await export(store, run_log(run), tmp_path / f"{run}.zip")
    async with anyio.create_task_group() as tasks:
        for run in ("a", "b"):
            arguments = [f"{run}.zip", "--store", "sqlite:///both.db", "--program", "mine:program"]
            command = [sys.executable, "-m", "aworld_runtime.cli", "import", *arguments]
            tasks.start_soon(partial(anyio.run_process, command, cwd=tmp_path))
    async with open_store(f"sqlite:///{tmp_path}/both.db") as both:
        assert len(await both.logs()) == 42
        assert len(await both.episodes()) == 40
        for run in ("a", "b"):
            async with open_store(f"sqlite:///{tmp_path}/{run}.db") as store:
                for log in await store.logs():
                    assert await both.read(log) == await store.read(log)


# --- what is wrong with a file -------------------------------------------------------------------------------------


async def test_an_unknown_type_is_named(store: Store, empty: Store, tmp_path: Path) -> None:
    await export(store, RUN, tmp_path / "r1.zip")
    ignorant = Registry()
    del ignorant.types["seal.broken"]
    told = r"events/episode:one.jsonl, line 3: unknown event type 'seal.broken': import the module"
    with pytest.raises(UnknownEventTypeError, match=told):
        await import_file(tmp_path / "r1.zip", empty, ignorant)
    assert await empty.logs() == []


Change = Callable[[dict[str, bytes]], object]
"""Of the members of a file, by name."""


def rewrite(file: Path, change: Change, *, consistent: bool = False) -> None:
    """Change members; `consistent` has the manifest agree with what is there then."""
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    if consistent:
        manifest = json.loads(members[MANIFEST])
        for name, data in members.items():
            if name != MANIFEST:
                sha256 = hashlib.sha256(data).hexdigest()
                manifest["members"][name] = {"size": len(data), "sha256": sha256}
        members[MANIFEST] = json.dumps(manifest).encode()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def edited(name: str, old: bytes, new: bytes) -> Change:
    def change(members: dict[str, bytes]) -> None:
        assert old in members[name]
        members[name] = members[name].replace(old, new, 1)

    return change


def manifest_with(**fields: JsonValue) -> Change:
    def change(members: dict[str, bytes]) -> None:
        members[MANIFEST] = json.dumps(json.loads(members[MANIFEST]) | fields).encode()

    return change


def without_blob(members: dict[str, bytes]) -> None:
    (blob,) = (name for name in members if name.startswith(BLOBS))
    del members[blob]


def without_blob_in_manifest(members: dict[str, bytes]) -> None:
    without_blob(members)
    manifest = json.loads(members[MANIFEST])
    manifest["members"] = {k: v for k, v in manifest["members"].items() if "blobs/" not in k}
    members[MANIFEST] = json.dumps(manifest).encode()


def with_a_huge_member(members: dict[str, bytes]) -> None:
    """Bytes that compress a thousand times."""
    members[log_member(ONE)] = bytes(20_000_000)


def with_a_huge_event(members: dict[str, bytes]) -> None:
    members[log_member(ONE)] = b'{"seq":1,"id":"' + b"x" * 9_000_000 + b'"}\n'


ONE_LINES = log_member(ONE)
PLACES = st.integers(0, 1_000_000)
INCONSISTENT: dict[str, tuple[Change, str]] = {
    "an event changed": (edited(ONE_LINES, b"one 0", b"one 9"), "episode:one.jsonl: .* sha256"),
    "an event more": (edited(ONE_LINES, b"one 0", b"one 00"), "episode:one.jsonl: .* more than"),
    "a member missing": (lambda m: m.pop(ONE_LINES), "episode:one.jsonl: it is missing"),
    "a blob missing": (without_blob, "blobs/[0-9a-f]{64}: it is missing"),
    "a blob named nowhere": (without_blob_in_manifest, "one.jsonl, line 2: its content.*missing"),
    "a bomb": (with_a_huge_member, "episode:one.jsonl: it has more than"),
    "a stranger": (lambda m: m.update({"../../evil": b"!"}), r"'../../evil': the manifest"),
    "no manifest": (lambda m: m.pop(MANIFEST), "no exported file: no manifest.json"),
    "no JSON": (lambda m: m.update({MANIFEST: b"{"}), "manifest.json: "),
    "a list": (lambda m: m.update({MANIFEST: b"[]"}), "manifest.json: "),
    "a newer format": (manifest_with(format=2, more=1), "format 2, by aworld-rt .*: upgrade"),
    "no format": (manifest_with(format=0), "manifest.json: .*format"),
    "an unknown field": (manifest_with(more=1), "manifest.json: .*more"),
    "another id": (manifest_with(id="r2"), "manifest.json: the log of run 'r2' is missing"),
    "no logs": (manifest_with(logs={}), "manifest.json: it names 'events/"),
    "a log of no kind": (manifest_with(logs={"feed": {"first": 1, "last": 1}}), "it names 'ev"),
}
CONSISTENT: dict[str, tuple[Change, str]] = {
    "a gap": (edited(ONE_LINES, b'{"seq":4,', b'{"seq":5,'), "line 4: it is event 5; expected 4"),
    "an end missing": (edited(ONE_LINES, b'{"seq":6,', b"#"), "line 6: .*begins with"),
    "no such event": (
        edited(ONE_LINES, b'"content":"one 0"', b'"words":1'),
        "line 4: not an event",
    ),
    "a newer schema": (
        edited(ONE_LINES, b'"type":"seal.broken"', b'"type":"seal.broken","schema_version":2'),
        "line 3: event seal.broken has schema version 2, newer than 1: upgrade",
    ),
    "a cut line": (edited(ONE_LINES, b"}}\n", b"}}"), "line 1: not an event"),
    "no fork": (edited(ONE_LINES, b'{"seq":1,', b'{"seq":2,'), "line 1: it is event 2; expected 1"),
    "an event too large": (with_a_huge_event, "line 1: 9000009 bytes; at most 8388608"),
    "a line too long": (with_a_huge_member, "one.jsonl: a line is longer than"),
    "a row": (edited(ROLLOUTS, b"[false,true]", b"7"), "rollouts.jsonl, line 1: .*loss_mask"),
    "a path": (lambda m: m.update({"../evil": b""}), r"manifest.json: it names '\.\./evil'"),
    "a blob that is another": (
        lambda m: m.update({BLOBS + "0" * 64: b"{}"}),
        "it names 'blobs/000",
    ),
}


@pytest.mark.parametrize("damage", [*INCONSISTENT, *CONSISTENT])
async def test_a_damaged_file_is_told_with_the_member_and_changes_nothing(
    store: Store, empty: Store, tmp_path: Path, damage: str
) -> None:
    file = tmp_path / "r1.zip"
    await export(store, RUN, file)
    change, told = (INCONSISTENT | CONSISTENT)[damage]
    rewrite(file, change, consistent=damage in CONSISTENT)
    before = content(empty)
    with pytest.raises(DamagedFileError, match=told) as caught:
        await import_file(file, empty)
    assert "\n" not in str(caught.value)
    assert content(empty) == before


async def test_a_fork_whose_parent_is_missing_is_refused(store: Store, tmp_path: Path) -> None:
    data = [EpisodeForked(parent=ONE, at=3), EpisodeFinished(answer="three")]
    await keep(store, "three", [event(one, seq, "three") for seq, one in enumerate(data, 4)])
    file = tmp_path / "three.zip"
    await export(store, episode_log("three"), file)

    def orphan(members: dict[str, bytes]) -> None:
        manifest = Manifest.model_validate_json(members[MANIFEST])
        logs = {log: span for log, span in manifest.logs.items() if log != ONE}
        kept = {k: m for k, m in manifest.members.items() if k != log_member(ONE)}
        del members[log_member(ONE)]
        orphaned = manifest.model_copy(update={"logs": logs, "members": kept})
        members[MANIFEST] = orphaned.model_dump_json().encode()

    rewrite(file, orphan)
    with pytest.raises(DamagedFileError, match="fork of episode:one at 3, which is missing"):
        await read_events(file)


async def read_events(file: Path) -> list[Event]:
    with ExportedFile(file, Registry()) as exported:
        await exported.check()
        return [event for log in exported.manifest.logs for p in exported.pages(log) for event in p]


@pytest.fixture(scope="module")
async def exported_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[Event]]:
    folder = tmp_path_factory.mktemp("exported")
    async with open_store(f"sqlite:///{folder}/store.db") as store:
        await keep(store, "one", an_episode("one"))
        await export(store, ONE, folder / "one.zip")
    return (folder / "one.zip").read_bytes(), await read_events(folder / "one.zip")


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    flips=st.lists(st.tuples(PLACES, st.integers(1, 255)), min_size=1, max_size=4),
    cut=st.none() | PLACES,
)
async def test_flipped_bytes_and_cuts_are_refused_or_harmless_and_never_a_traceback(
    exported_once: tuple[bytes, list[Event]],
    tmp_path: Path,
    flips: list[tuple[int, int]],
    cut: int | None,
) -> None:
    """Harmless is what a zip says of dates and systems: the events are then as they were."""
    whole, expected = exported_once
    damaged = bytearray(whole)
    for place, change in flips:
        damaged[place % len(whole)] ^= change
    if cut is not None:
        del damaged[cut % len(whole) :]
    file = tmp_path / "damaged.zip"
    file.write_bytes(damaged)
    with suppress(DamagedFileError):
        assert await read_events(file) == expected


async def test_the_commands_say_what_they_did_or_what_is_wrong_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PROGRAM)
    async with open_store(f"sqlite:///{tmp_path}/.aworld/aworld.db") as store:
        await keep(store, "one", an_episode("one"))

    async def aworld(*arguments: str) -> tuple[int, str, str]:
        command = [sys.executable, "-m", "aworld_runtime.cli", *arguments]
        done = await anyio.run_process(command, cwd=tmp_path, check=False)
        return done.returncode, done.stdout.decode(), done.stderr.decode()

    code, _, error = await aworld("export", "one", "-o", "one.zip")
    assert (code, "--program MODULE:ATTRIBUTE" in error) == (2, True)
    mine = ("--program", "mine:program")
    code, printed, _ = await aworld("export", "last", "-o", "one.zip", *mine, "--json")
    assert code == 0
    told = json.loads(printed)
    assert (told["kind"], told["id"], told["logs"], told["events"]) == ("episode", "one", 1, 6)
    there = ("--store", "sqlite:///other/new.db")
    code, _, error = await aworld("import", "one.zip", *there)
    assert (code, "unknown event type 'seal.broken'" in error) == (2, True)
    assert "--program MODULE:ATTRIBUTE" in error
    assert not (tmp_path / "other").exists()
    code, printed, _ = await aworld("import", "one.zip", *there, *mine)
    assert (code, "episode one: 1 log, 6 events, 6 of them new in sqlite" in printed) == (0, True)
