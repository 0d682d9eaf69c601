"""What only the SQLite store promises: its URLs, its file, its errors."""

import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import anyio
import pytest

from aworld_runtime.errors import ConfigError, MissingBlobError, StoreError, StoreUnavailableError
from aworld_runtime.events import Event, MessagePosted, Registry
from aworld_runtime.store import open_store
from aworld_runtime.store import sqlite as backend
from aworld_runtime.store.sqlite import SQLiteStore
from tests.waiting import wait_until

EVENT = Event.of(MessagePosted(content="hello"), source="user/1").at(1)


async def test_relative_path_and_its_folders_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with open_store("sqlite:///.aworld/deep/store.db"):
        assert (tmp_path / ".aworld/deep/store.db").exists()


@pytest.mark.parametrize(
    "url", ["sqlite://", "sqlite:///", "sqlite://file.db", "sqlite:///:memory:", "sqlite:///a?b=c"]
)
def test_url_without_a_file_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="sqlite:///folder/file"):
        open_store(url)


async def test_events_keep_stubs_and_a_blob_that_is_missing_is_named(tmp_path: Path) -> None:
    file = tmp_path / "store.db"
    large = Event.of(MessagePosted(content="x" * 200_000), source="user/1")
    async with _store(file) as store:
        await store.put_events("log", [large.at(1), large.at(2)])
        with closing(sqlite3.connect(file, isolation_level=None)) as database:
            (longest,) = database.execute("SELECT max(length(body)) FROM events").fetchone()
            assert longest < 500
            [(sha256,)] = database.execute("DELETE FROM blobs RETURNING sha256").fetchall()
        with pytest.raises(MissingBlobError, match=f"event 1 of log in .*{sha256}"):
            await store.read("log")


async def test_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("not a database " * 100)
    await _refused(file, "not a SQLite database")


async def test_another_programs_database_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "other.db"
    other = sqlite3.connect(file)
    other.execute("CREATE TABLE events (mine TEXT)")
    other.close()
    await _refused(file, "another program's database")


async def test_a_file_of_an_older_schema_is_brought_up_to_date(tmp_path: Path) -> None:
    file = tmp_path / "store.db"
    async with _store(file):
        pass
    older = sqlite3.connect(file)
    older.execute("DROP INDEX episodes_unfinished")
    older.execute("DROP TABLE buses")
    older.execute("PRAGMA user_version = 1")
    older.close()
    async with _store(file) as store:
        assert await store.unfinished("feed") == []
        assert await store.bus("redis://a") is None
    indexes = sqlite3.connect(file)
    assert indexes.execute(
        "SELECT 1 FROM sqlite_schema WHERE name = 'episodes_unfinished'"
    ).fetchone()
    indexes.close()


async def test_an_opening_that_is_cancelled_leaves_no_thread(tmp_path: Path) -> None:
    """While another process holds the file."""
    file = tmp_path / "store.db"
    async with _store(file):
        pass
    with closing(sqlite3.connect(file, isolation_level=None)) as holder:
        holder.execute("PRAGMA locking_mode = EXCLUSIVE")
        holder.execute("BEGIN EXCLUSIVE")
        before = threading.active_count()
        with anyio.move_on_after(0.2) as opening:
            async with _store(file):
                pass
        assert opening.cancelled_caught
        assert threading.active_count() > before
    await wait_until(lambda: threading.active_count() <= before, 10, "the end of its thread")


async def test_newer_schema_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "store.db"
    async with _store(file):
        pass
    newer = sqlite3.connect(file)
    newer.execute("PRAGMA user_version = 99")
    newer.close()
    await _refused(file, "upgrade")


async def test_folder_in_the_way_is_refused(tmp_path: Path) -> None:
    await _refused(tmp_path, "cannot be opened")
    (tmp_path / "file").write_text("")
    await _refused(tmp_path / "file" / "store.db", "cannot make its folder")


async def test_full_disk_fails_the_write_and_is_got_over(tmp_path: Path) -> None:
    """A limit on pages stands for the disk."""
    async with _store(tmp_path / "store.db") as store:
        await _pragma(store, "max_page_count = 30")
        with pytest.raises(StoreError, match="disk is full"):
            await store.put_blob(bytes(1_000_000))
        assert await store.last_seq("log") == 0
        await _pragma(store, "max_page_count = 9999")
        await store.put_blob(bytes(1_000_000))


async def test_read_only_file_is_read_and_not_written(tmp_path: Path) -> None:
    async with _store(tmp_path / "store.db") as store:
        await store.put_events("log", [EVENT])
        await _pragma(store, "query_only = 1")
        with pytest.raises(StoreError, match="read-only"):
            await store.put_events("log", [EVENT.at(2)])
        assert await store.read("log") == [EVENT]


async def test_writer_that_blocks_too_long_is_an_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "BUSY_S", 0.1)
    file = tmp_path / "store.db"
    async with _store(file) as store:
        other = sqlite3.connect(file, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailableError, match="another process"):
            await store.put_events("log", [EVENT])
        other.execute("ROLLBACK")
        other.close()
        await store.put_events("log", [EVENT])


def _store(file: Path) -> SQLiteStore:
    return SQLiteStore(f"sqlite:///{file}", Registry())


async def _pragma(store: SQLiteStore, text: str) -> None:
    """Set something in the writer's own connection."""
    writer = store._writer  # pyright: ignore[reportPrivateUsage]
    await writer.call(lambda db: db.execute(f"PRAGMA {text}").fetchall())


async def _refused(file: Path, why: str) -> None:
    with pytest.raises(StoreError, match=why):
        async with _store(file):
            pass
