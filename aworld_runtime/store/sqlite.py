"""The store in one SQLite file.

    put_*  ──▶ queue ──▶ writer thread: takes all that waits, one transaction, one commit ──▶ futures
    read…  ──▶ queue ──▶ reader thread: a connection of its own                           ──▶ futures

WAL mode: other processes may read while a run writes, and write in turn. A commit survives the death of the process;
after a power cut the last ones may be missing, events and cursor alike, and the archiver writes them again.
A call that is cancelled may still have been written.
"""

from __future__ import annotations

import asyncio
import hashlib
import queue
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Generic, Self, TypeVar, cast
from urllib.parse import unquote, urlsplit

import anyio

from aworld_runtime.errors import (
    AWorldError,
    ConfigError,
    StoreError,
    StoreUnavailableError,
)
from aworld_runtime.events import Event, Registry
from aworld_runtime.payloads import Blob, references
from aworld_runtime.store.base import BusRecord, EpisodeRecord, RolloutRow, RunRecord
from aworld_runtime.store.documents import (
    RowDocument,
    check_same,
    microseconds,
    pack_metrics,
    pack_row,
    unpack_metrics,
    unpack_row,
)

BUSY_S = 4.0
"""Seconds to wait for another process that writes."""
JOBS_PER_COMMIT = 256
ROWS_PER_PAGE = 64
"""Training rows held in memory while they stream."""
RECORDS_PER_PAGE = 100
"""The same for episodes."""
APPLICATION_ID = 0x41574C44
"""Marks the file as ours ("AWLD"), so that we never write into another program's database."""
SCHEMAS = (
    """
CREATE TABLE events (log TEXT NOT NULL, seq INTEGER NOT NULL, id TEXT NOT NULL, body BLOB NOT NULL);
CREATE UNIQUE INDEX events_log_seq ON events (log, seq);
CREATE TABLE episodes (id TEXT PRIMARY KEY, run_id TEXT, group_id TEXT, started INTEGER NOT NULL,
    last_seq INTEGER NOT NULL, body TEXT NOT NULL);
CREATE INDEX episodes_run ON episodes (run_id, started);
CREATE INDEX episodes_group ON episodes (group_id, started);
CREATE INDEX episodes_started ON episodes (started);
CREATE TABLE runs (id TEXT PRIMARY KEY, started INTEGER NOT NULL, body TEXT NOT NULL);
CREATE INDEX runs_started ON runs (started);
CREATE TABLE rollouts (id TEXT PRIMARY KEY, run_id TEXT NOT NULL, group_id TEXT NOT NULL, episode_id TEXT NOT NULL,
    role TEXT NOT NULL, token_ids BLOB NOT NULL, loss_mask BLOB NOT NULL, behavior_logprobs BLOB NOT NULL,
    policy TEXT NOT NULL, policy_version INTEGER NOT NULL, reward REAL, weight REAL);
CREATE INDEX rollouts_run ON rollouts (run_id, id);
CREATE TABLE metrics (run_id TEXT NOT NULL, step INTEGER NOT NULL, body TEXT NOT NULL, PRIMARY KEY (run_id, step));
CREATE TABLE blobs (sha256 TEXT PRIMARY KEY, content BLOB NOT NULL);
CREATE TABLE cursors (follower TEXT PRIMARY KEY, cursor TEXT NOT NULL)
""",
    """
CREATE INDEX episodes_unfinished ON episodes (json_extract(body, '$.feed'), id)
    WHERE json_extract(body, '$.status') IS NULL
""",
    """
CREATE TABLE buses (url TEXT PRIMARY KEY, body TEXT NOT NULL)
""",
)
"""What each version of the schema adds to the one before."""
SCHEMA_VERSION = len(SCHEMAS)

PUT_BLOB = "INSERT OR IGNORE INTO blobs (sha256, content) VALUES (?, ?)"

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]


class SQLiteStore:
    """See `Store`; `sqlite:///relative/file.db` or `sqlite:////absolute/file.db`. The folder is made."""

    def __init__(self, url: str, registry: Registry) -> None:
        self.url = url
        self.path = path_of(url)
        self._registry = registry
        self._writer = ConnectionThread(self.path, _commit, name="store-writer")
        self._reader = ConnectionThread(self.path, _each, name="store-reader")

    async def __aenter__(self) -> Self:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"store {self.url!r}: cannot make its folder: {error.strerror}"
            ) from error
        # One after the other: the writer makes the tables.
        await self._writer.start()
        try:
            await self._reader.start()
        except BaseException:
            await self._writer.stop()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._reader.stop()
        await self._writer.stop()

    async def put_events(self, log: str, events: Sequence[Event]) -> None:
        if any(event.seq < 1 for event in events):
            raise ValueError(f"events of {log!r} without a seq: only an append gives one")
        if events:
            await self._writer.call(lambda db: _insert_events(db, self._registry, log, events))

    async def read(self, log: str, start: int = 1, *, limit: int = 10_000) -> list[Event]:
        query = "SELECT seq, body FROM events WHERE log = ? AND seq >= ? ORDER BY seq LIMIT ?"

        def work(db: sqlite3.Connection) -> list[Event]:
            rows: list[tuple[int, bytes]] = db.execute(query, (log, start, limit)).fetchall()
            blobs = _blobs(db, references(body for _, body in rows))
            return self._registry.decode_log(rows, blobs, log=log, at=self.url)

        return await self._reader.call(work)

    async def last_seq(self, log: str) -> int:
        rows = await self._rows("SELECT max(seq) FROM events WHERE log = ?", log)
        return rows[0][0] or 0

    async def logs(self, prefix: str = "") -> list[str]:
        # From one name to the next through the index, not over every event.
        query = """
            WITH RECURSIVE names (log) AS (
                SELECT min(log) FROM events WHERE log >= ?1
                UNION ALL
                SELECT (SELECT min(log) FROM events WHERE log > names.log) FROM names
                WHERE substr(names.log, 1, ?2) = ?1
            )
            SELECT log FROM names WHERE substr(log, 1, ?2) = ?1
        """
        return [row[0] for row in await self._rows(query, prefix, len(prefix))]

    async def put_episode(self, episode: EpisodeRecord) -> None:
        await self._write(
            """
            INSERT INTO episodes (id, run_id, group_id, started, last_seq, body) VALUES (?, ?, ?, ?, ?, ?)
            ON CONFLICT (id) DO UPDATE SET run_id = excluded.run_id, group_id = excluded.group_id,
                started = excluded.started, last_seq = excluded.last_seq, body = excluded.body
            WHERE excluded.last_seq > episodes.last_seq OR (excluded.last_seq = episodes.last_seq
                AND json_extract(excluded.body, '$.feed') IS NOT json_extract(episodes.body, '$.feed'))
            """,
            episode.id,
            episode.run_id,
            episode.group_id,
            microseconds(episode.started),
            episode.last_seq,
            episode.model_dump_json(),
        )

    async def episode(self, episode_id: str) -> EpisodeRecord | None:
        rows = await self._rows("SELECT body FROM episodes WHERE id = ?", episode_id)
        return EpisodeRecord.model_validate_json(rows[0][0]) if rows else None

    async def episodes(
        self, *, run_id: str | None = None, group_id: str | None = None, limit: int = 1000
    ) -> list[EpisodeRecord]:
        wanted = {"run_id": run_id, "group_id": group_id}
        given = {column: value for column, value in wanted.items() if value is not None}
        where = " AND ".join(f"{column} = ?" for column in given) or "true"
        query = f"SELECT body FROM episodes WHERE {where} ORDER BY started DESC, id DESC LIMIT ?"  # noqa: S608 - our own names
        rows = await self._rows(query, *given.values(), limit)
        return [EpisodeRecord.model_validate_json(row[0]) for row in rows]

    async def run_episodes(self, run_id: str) -> AsyncIterator[EpisodeRecord]:
        query = """
            SELECT started, id, body FROM episodes WHERE run_id = ? AND (started, id) > (?, ?)
            ORDER BY started, id LIMIT ?
        """
        last = (-1, "")
        while page := await self._rows(query, run_id, *last, RECORDS_PER_PAGE):
            for started, episode_id, body in page:
                yield EpisodeRecord.model_validate_json(body)
                last = (started, episode_id)

    async def unfinished(
        self, feed: str, *, after: str = "", limit: int = 100
    ) -> list[EpisodeRecord]:
        query = """
            SELECT body FROM episodes
            WHERE json_extract(body, '$.feed') = ? AND id > ? AND json_extract(body, '$.status') IS NULL
            ORDER BY id LIMIT ?
        """
        rows = await self._rows(query, feed, after, limit)
        return [EpisodeRecord.model_validate_json(row[0]) for row in rows]

    async def put_run(self, run: RunRecord) -> None:
        await self._write(
            "INSERT OR REPLACE INTO runs (id, started, body) VALUES (?, ?, ?)",
            run.id,
            microseconds(run.started),
            run.model_dump_json(),
        )

    async def runs(self, *, limit: int = 100) -> list[RunRecord]:
        query = "SELECT body FROM runs ORDER BY started DESC, id DESC LIMIT ?"
        return [RunRecord.model_validate_json(row[0]) for row in await self._rows(query, limit)]

    async def put_bus(self, bus: BusRecord) -> None:
        query = "INSERT OR REPLACE INTO buses (url, body) VALUES (?, ?)"
        await self._write(query, bus.url, bus.model_dump_json())

    async def bus(self, url: str) -> BusRecord | None:
        rows = await self._rows("SELECT body FROM buses WHERE url = ?", url)
        return BusRecord.model_validate_json(rows[0][0]) if rows else None

    async def put_rollouts(self, rows: Sequence[RolloutRow]) -> None:
        columns = tuple(RowDocument.__annotations__)
        query = (
            f"INSERT OR REPLACE INTO rollouts ({', '.join(columns)})"  # noqa: S608 - our own names
            f" VALUES ({', '.join('?' for _ in columns)})"
        )

        def work(db: sqlite3.Connection) -> None:
            db.executemany(query, (tuple(pack_row(row).values()) for row in rows))

        if rows:
            await self._writer.call(work)

    async def rollouts(self, run_id: str) -> AsyncIterator[RolloutRow]:
        columns = tuple(RowDocument.__annotations__)
        query = (
            f"SELECT {', '.join(columns)} FROM rollouts WHERE run_id = ? AND id > ?"  # noqa: S608 - our own names
            " ORDER BY id LIMIT ?"
        )
        last = ""
        while page := await self._rows(query, run_id, last, ROWS_PER_PAGE):
            for values in page:
                row = unpack_row(_document(columns, values))
                yield row
                last = row.id

    async def put_metrics(self, run_id: str, step: int, metrics: Mapping[str, float]) -> None:
        query = "INSERT OR REPLACE INTO metrics (run_id, step, body) VALUES (?, ?, ?)"
        await self._write(query, run_id, step, pack_metrics(metrics))

    async def metrics(self, run_id: str) -> list[tuple[int, dict[str, float]]]:
        query = "SELECT step, body FROM metrics WHERE run_id = ? ORDER BY step"
        return [(step, unpack_metrics(body)) for step, body in await self._rows(query, run_id)]

    async def put_blob(self, content: bytes) -> str:
        sha256 = hashlib.sha256(content).hexdigest()
        await self._write(PUT_BLOB, sha256, content)
        return sha256

    async def blob(self, sha256: str) -> bytes | None:
        rows = await self._rows("SELECT content FROM blobs WHERE sha256 = ?", sha256)
        return rows[0][0] if rows else None

    async def cursor(self, follower: str) -> str | None:
        rows = await self._rows("SELECT cursor FROM cursors WHERE follower = ?", follower)
        return rows[0][0] if rows else None

    async def set_cursor(self, follower: str, cursor: str) -> None:
        query = "INSERT OR REPLACE INTO cursors (follower, cursor) VALUES (?, ?)"
        await self._write(query, follower, cursor)

    async def _write(self, query: str, *values: object) -> None:
        def work(db: sqlite3.Connection) -> None:
            db.execute(query, values)

        await self._writer.call(work)

    async def _rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        return await self._reader.call(lambda db: db.execute(query, values).fetchall())


def path_of(url: str) -> Path:
    """The file that a `sqlite:` URL names.

    Raises:
        ConfigError: it names none.
    """
    parts = urlsplit(url)
    path = unquote(parts.path[1:])
    if parts.netloc or parts.query or not path or path == ":memory:":
        raise ConfigError(
            f"store={url!r} names no file: write sqlite:///folder/file.db (relative)"
            " or sqlite:////folder/file.db (absolute)"
        )
    return Path(path)


def _insert_events(
    db: sqlite3.Connection, registry: Registry, log: str, events: Sequence[Event]
) -> None:
    blobs: list[Blob] = []
    rows = [(log, event.seq, event.id, registry.encode_apart(event, blobs)) for event in events]
    db.executemany(PUT_BLOB, blobs)
    before = db.total_changes
    db.executemany(
        "INSERT INTO events (log, seq, id, body) VALUES (?, ?, ?, ?) ON CONFLICT (log, seq) DO NOTHING",
        rows,
    )
    if db.total_changes - before == len(events):
        return
    seqs = [event.seq for event in events]
    kept = db.execute(
        "SELECT seq, id FROM events WHERE log = ? AND seq BETWEEN ? AND ?",
        (log, min(seqs), max(seqs)),
    )
    check_same(log, events, dict(kept))


def _blobs(db: sqlite3.Connection, wanted: Iterable[str]) -> dict[str, bytes]:
    query = "SELECT sha256, content FROM blobs WHERE sha256 = ?"
    return dict(row for sha256 in wanted for row in db.execute(query, (sha256,)))


def _document(columns: tuple[str, ...], values: tuple[Any, ...]) -> RowDocument:
    # SQLite keeps no NaN: it comes back as NULL.
    fields = zip(columns, values, strict=True)
    return cast("RowDocument", {c: float("nan") if v is None else v for c, v in fields})


# --- threads -------------------------------------------------------------------------------------------------------


class Job(Generic[T]):
    """Something to do with a connection, and where its outcome goes."""

    def __init__(self, work: Work[T]) -> None:
        self.work = work
        self.future: Future[T] = Future()


class ConnectionThread:
    """One thread with one connection. `settle` does the jobs that wait and sets their futures."""

    def __init__(
        self,
        path: Path,
        settle: Callable[[sqlite3.Connection, Path, list[Job[Any]]], None],
        *,
        name: str,
    ) -> None:
        self._path = path
        self._settle = settle
        self._name = name
        self._jobs: queue.SimpleQueue[Job[Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def start(self) -> None:
        """Open the connection; raises `StoreError` where the file can't be used."""
        opened: Future[None] = Future()
        thread = threading.Thread(target=self._run, args=(opened,), name=self._name, daemon=True)
        thread.start()
        await asyncio.wrap_future(opened)
        self._thread = thread

    async def stop(self) -> None:
        """Do what waits, then close the connection. May be called again."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._jobs.put(None)
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(thread.join)

    async def call(self, work: Work[T]) -> T:
        if self._thread is None:
            raise StoreError("the store is not open: use it inside `async with`")
        job = Job(work)
        self._jobs.put(job)
        return await asyncio.wrap_future(job.future)

    def _run(self, opened: Future[None]) -> None:
        try:
            db = _open(self._path)
        except Exception as error:  # noqa: BLE001 - the thread's boundary: whoever waits gets it
            if opened.set_running_or_notify_cancel():
                opened.set_exception(error)
            return
        if not opened.set_running_or_notify_cancel():  # nobody waits any more
            db.close()
            return
        opened.set_result(None)
        while (job := self._jobs.get()) is not None:
            jobs = [job, *self._waiting()]
            self._settle(
                db, self._path, [j for j in jobs if j.future.set_running_or_notify_cancel()]
            )
        db.close()

    def _waiting(self) -> Iterable[Job[Any]]:
        for _ in range(JOBS_PER_COMMIT - 1):
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return
            if job is None:  # keep the end in its place
                self._jobs.put(None)
                return
            yield job


def _each(db: sqlite3.Connection, path: Path, jobs: list[Job[Any]]) -> None:
    """Do each job by itself."""
    for job in jobs:
        try:
            job.future.set_result(job.work(db))
        except sqlite3.Error as error:
            job.future.set_exception(_explain(error, path))
        except Exception as error:  # noqa: BLE001 - the thread's boundary: whoever waits gets it
            job.future.set_exception(error)


def _commit(db: sqlite3.Connection, path: Path, jobs: list[Job[Any]]) -> None:
    """Do all jobs in one transaction. A refused job takes only itself back; a failing database fails them all."""
    outcomes: list[tuple[Job[Any], Any, Exception | None]] = []
    try:
        db.execute("BEGIN IMMEDIATE")
        for job in jobs:
            db.execute("SAVEPOINT job")
            try:
                outcomes.append((job, job.work(db), None))
            except sqlite3.Error:
                raise
            except Exception as error:  # noqa: BLE001 - the thread's boundary: whoever waits gets it
                db.execute("ROLLBACK TO job")
                outcomes.append((job, None, error))
            db.execute("RELEASE job")
        db.execute("COMMIT")
    except sqlite3.Error as error:
        if db.in_transaction:
            db.execute("ROLLBACK")
        failure = _explain(error, path)
        outcomes = [(job, None, failure) for job in jobs]
    for job, result, failed in outcomes:
        if failed is None:
            job.future.set_result(result)
        else:
            job.future.set_exception(failed)


# --- the file ------------------------------------------------------------------------------------------------------


def _open(path: Path) -> sqlite3.Connection:
    """A connection to a file with our tables in it; made where they are missing.

    Raises:
        StoreError: another program's database, a newer schema, or what SQLite says.
    """
    deadline = time.monotonic() + BUSY_S
    while True:
        try:
            db = sqlite3.connect(
                path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
            )
            try:
                _prepare(db, path)
            except BaseException:
                db.close()
                raise
            return db
        except sqlite3.Error as error:
            # Switching to WAL reports a busy file at once, whatever the timeout.
            if _code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise _explain(error, path) from error
            time.sleep(0.02)


def _prepare(db: sqlite3.Connection, path: Path) -> None:
    if _version(db, path) < SCHEMA_VERSION:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("BEGIN IMMEDIATE")
        if (version := _version(db, path)) < SCHEMA_VERSION:  # nobody else was first
            for addition in SCHEMAS[version:]:
                for statement in addition.split(";"):
                    db.execute(statement)
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        db.execute("COMMIT")
    db.execute("PRAGMA synchronous = NORMAL")


def _version(db: sqlite3.Connection, path: Path) -> int:
    (version,) = db.execute("PRAGMA user_version").fetchone()
    (application,) = db.execute("PRAGMA application_id").fetchone()
    (tables,) = db.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if tables and application != APPLICATION_ID:
        raise StoreError(f"store {path} is another program's database: name another file")
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"store {path} has schema version {version}; this version reads up to {SCHEMA_VERSION}: upgrade aworld-rt"
        )
    return version


def _code(error: sqlite3.Error) -> int:
    """SQLite's primary result code; 0 where Python's module itself raised."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _explain(error: sqlite3.Error, path: Path) -> AWorldError:
    advice = {
        sqlite3.SQLITE_NOTADB: "it is not a SQLite database: name another file",
        sqlite3.SQLITE_CORRUPT: "it is damaged: restore a copy, or name another file",
        sqlite3.SQLITE_CANTOPEN: "it cannot be opened: is it a folder, or not yours to read and write?",
        sqlite3.SQLITE_READONLY: "it is read-only: make the file and its folder writable, or name another file",
        sqlite3.SQLITE_FULL: "the disk is full: free some space",
    }
    code = _code(error)
    if code in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}:
        return StoreUnavailableError(
            f"store {path}: another process has been writing for {BUSY_S:g} s ({error})"
        )
    return StoreError(f"store {path}: {advice.get(code, 'SQLite failed')} ({error})")
