"""The store in MongoDB, over pymongo's asynchronous client.

    put_*  ──▶ shielded, with a deadline ──▶ client ──▶ server, w: majority, j: true
    read…  ─────────────────────────────────┘

A cancelled operation would cost the client its connection, so a write that has begun is finished or runs into its
deadline; only then is the caller's cancellation seen. Every `_id` follows from the content, so writing again changes
nothing. Events of one log go in order: what is kept of a log has no gaps, whatever interrupts a batch.

One event loop may use a store. It must not be carried over a fork.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Self, TypeVar, cast

import anyio
import pymongo
from pymongo import ASCENDING, DESCENDING, AsyncMongoClient, IndexModel, ReplaceOne
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import (
    BulkWriteError,
    ConfigurationError,
    ConnectionFailure,
    DocumentTooLarge,
    DuplicateKeyError,
    InvalidURI,
    OperationFailure,
    PyMongoError,
)
from pymongo.write_concern import WriteConcern

from aworld_runtime.errors import (
    ConfigError,
    StoreError,
    StoreUnavailableError,
)
from aworld_runtime.events import Event, Registry
from aworld_runtime.payloads import Blob, in_pieces, references
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
from aworld_runtime.urls import check_user, shown

DATABASE = "aworld"
"""Where the URL names none."""
CONNECT_S = 3.5
"""Seconds to find the server and make the indexes, on entry."""
OPERATION_S = 5.0
"""Seconds for one operation, its retries included; as long may a cancellation take."""
BATCH_BYTES = 8 * 1024 * 1024
"""Content of one insert; the server takes 48 MB."""
BATCH_EVENTS = 1000
"""Events in one insert, so that a busy server is done before the deadline."""
BLOB_BYTES = 16 * 1024 * 1024 - 64 * 1024
"""A document holds 16 MiB, its other fields included."""
ROWS_PER_PAGE = 64
"""Training rows held in memory while they stream."""
RECORDS_PER_PAGE = 100
"""The same for episodes."""
DUPLICATE = 11000
AUTHENTICATION_CODES = frozenset({13, 18, 8000})

INDEXES = {
    "events": [IndexModel([("log", ASCENDING), ("seq", ASCENDING)])],
    "episodes": [
        IndexModel([("run_id", ASCENDING), ("started", DESCENDING)]),
        IndexModel([("group_id", ASCENDING), ("started", DESCENDING)]),
        IndexModel([("started", DESCENDING)]),
        IndexModel([("feed", ASCENDING), ("running", ASCENDING), ("_id", ASCENDING)]),
    ],
    "runs": [IndexModel([("started", DESCENDING)])],
    "rollouts": [IndexModel([("run_id", ASCENDING), ("_id", ASCENDING)])],
    "metrics": [IndexModel([("run_id", ASCENDING), ("step", ASCENDING)])],
}

Document = dict[str, Any]
T = TypeVar("T")


class MongoStore:
    """See `Store`; `mongodb://[user:password@]host[:port]/[database]`."""

    def __init__(self, url: str, registry: Registry) -> None:
        self.url = shown(url)
        self._full_url = url
        self._registry = registry
        self._client: AsyncMongoClient[Document] | None = None
        self._database: AsyncDatabase[Document] | None = None

    async def __aenter__(self) -> Self:
        try:
            check_user(self._full_url)
            client = AsyncMongoClient[Document](
                self._full_url,
                serverSelectionTimeoutMS=int(CONNECT_S * 1000),
                connectTimeoutMS=int(CONNECT_S * 1000),
                timeoutMS=int(OPERATION_S * 1000),
                appname="aworld-rt",
            )
            concern = WriteConcern(w=client.write_concern.document.get("w", "majority"), j=True)
        except (InvalidURI, ConfigurationError, ValueError) as error:
            raise ConfigError(f"store={self.url!r}: {error}") from error
        self._client = client
        self._database = client.get_default_database(DATABASE, write_concern=concern)
        try:
            await self._run(self._make_indexes)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        client, self._client, self._database = self._client, None, None
        if client is not None:
            with anyio.CancelScope(shield=True):
                await client.close()

    async def put_events(self, log: str, events: Sequence[Event]) -> None:
        if any(event.seq < 1 for event in events):
            raise ValueError(f"events of {log!r} without a seq: only an append gives one")
        batch: list[Event] = []
        documents: list[Document] = []
        size = 0
        blobs: list[Blob] = []
        for event in events:
            body = self._registry.encode_apart(event, blobs)
            while blobs:  # before the event that refers to it
                await self._put_blob(blobs.pop())
            if size + len(body) > BATCH_BYTES or len(batch) == BATCH_EVENTS:
                await self._insert(log, batch, documents)
                batch, documents, size = [], [], 0
            batch.append(event)
            documents.append(_event_document(log, event, body))
            size += len(body)
        await self._insert(log, batch, documents)

    async def read(self, log: str, start: int = 1, *, limit: int = 10_000) -> list[Event]:
        if limit < 1:  # MongoDB takes 0 for "all"
            return []

        async def work() -> list[Document]:
            wanted = {"log": log, "seq": {"$gte": start}}
            found = self._in("events").find(wanted, {"seq": 1, "body": 1}).sort("seq").limit(limit)
            return await found.to_list()

        rows = [(d["seq"], bytes(d["body"])) for d in await self._run(work)]
        blobs = await self._blobs(references(body for _, body in rows))
        return self._registry.decode_log(rows, blobs, log=log, at=self.url)

    async def last_seq(self, log: str) -> int:
        newest = [("seq", DESCENDING)]
        found = await self._run(
            lambda: self._in("events").find_one({"log": log}, {"seq": 1}, sort=newest)
        )
        return 0 if found is None else found["seq"]

    async def logs(self, prefix: str = "") -> list[str]:
        # Sorted and grouped by the index's first field, the server steps from name to name.
        stages: list[Mapping[str, Any]] = [
            {"$match": {"log": {"$gte": prefix, "$lt": prefix + "\U0010ffff"}}},
            {"$sort": {"log": 1}},
            {"$group": {"_id": "$log"}},
        ]

        async def work() -> list[Document]:
            return await (await self._in("events").aggregate(stages)).to_list()

        return sorted(document["_id"] for document in await self._run(work))

    async def put_episode(self, episode: EpisodeRecord) -> None:
        same_elsewhere = {"last_seq": episode.last_seq, "feed": {"$ne": episode.feed}}
        older = {
            "_id": episode.id,
            "$or": [{"last_seq": {"$lt": episode.last_seq}}, same_elsewhere],
        }
        document = {
            "_id": episode.id,
            "run_id": episode.run_id,
            "group_id": episode.group_id,
            "started": microseconds(episode.started),
            "last_seq": episode.last_seq,
            "feed": episode.feed,
            "running": episode.status is None,
            "body": episode.model_dump_json(),
        }

        async def work() -> None:
            try:
                await self._in("episodes").replace_one(older, document, upsert=True)
            except DuplicateKeyError:  # one that isn't older is there
                return

        await self._write(work)

    async def episode(self, episode_id: str) -> EpisodeRecord | None:
        found = await self._run(lambda: self._in("episodes").find_one({"_id": episode_id}))
        return None if found is None else EpisodeRecord.model_validate_json(found["body"])

    async def episodes(
        self, *, run_id: str | None = None, group_id: str | None = None, limit: int = 1000
    ) -> list[EpisodeRecord]:
        wanted = {"run_id": run_id, "group_id": group_id}
        given = {field: value for field, value in wanted.items() if value is not None}
        found = await self._newest("episodes", given, limit)
        return [EpisodeRecord.model_validate_json(document["body"]) for document in found]

    async def run_episodes(self, run_id: str) -> AsyncIterator[EpisodeRecord]:
        order = [("started", ASCENDING), ("_id", ASCENDING)]
        started, last = -1, ""

        async def work() -> list[Document]:
            later = [{"started": {"$gt": started}}, {"started": started, "_id": {"$gt": last}}]
            found = self._in("episodes").find({"run_id": run_id, "$or": later})
            return await found.sort(order).limit(RECORDS_PER_PAGE).to_list()

        while page := await self._run(work):
            for document in page:
                yield EpisodeRecord.model_validate_json(document["body"])
                started, last = document["started"], document["_id"]

    async def unfinished(
        self, feed: str, *, after: str = "", limit: int = 100
    ) -> list[EpisodeRecord]:
        wanted = {"feed": feed, "running": True, "_id": {"$gt": after}}

        async def work() -> list[Document]:
            found = self._in("episodes").find(wanted).sort("_id", ASCENDING).limit(limit)
            return await found.to_list()

        found = await self._run(work)
        return [EpisodeRecord.model_validate_json(document["body"]) for document in found]

    async def put_run(self, run: RunRecord) -> None:
        body = run.model_dump_json()
        await self._replace(
            "runs", {"_id": run.id, "started": microseconds(run.started), "body": body}
        )

    async def runs(self, *, limit: int = 100) -> list[RunRecord]:
        found = await self._newest("runs", {}, limit)
        return [RunRecord.model_validate_json(document["body"]) for document in found]

    async def put_bus(self, bus: BusRecord) -> None:
        await self._replace("buses", {"_id": bus.url, "body": bus.model_dump_json()})

    async def bus(self, url: str) -> BusRecord | None:
        found = await self._run(lambda: self._in("buses").find_one({"_id": url}))
        return None if found is None else BusRecord.model_validate_json(found["body"])

    async def put_rollouts(self, rows: Sequence[RolloutRow]) -> None:
        batch: list[ReplaceOne[Document]] = []
        size = 0
        for row in rows:
            packed = pack_row(row)
            row_size = sum(len(v) for v in packed.values() if isinstance(v, bytes))
            if batch and size + row_size > BATCH_BYTES:
                await self._replace_all("rollouts", batch)
                batch, size = [], 0
            batch.append(ReplaceOne({"_id": row.id}, {"_id": row.id, **packed}, upsert=True))
            size += row_size
        if batch:
            await self._replace_all("rollouts", batch)

    async def rollouts(self, run_id: str) -> AsyncIterator[RolloutRow]:
        last = ""
        while page := await self._page(run_id, last):
            for document in page:
                yield unpack_row(cast("RowDocument", document))
                last = document["_id"]

    async def put_metrics(self, run_id: str, step: int, metrics: Mapping[str, float]) -> None:
        body = pack_metrics(metrics)
        document = {"_id": f"{run_id}:{step}", "run_id": run_id, "step": step, "body": body}
        await self._replace("metrics", document)

    async def metrics(self, run_id: str) -> list[tuple[int, dict[str, float]]]:
        async def work() -> list[Document]:
            return await self._in("metrics").find({"run_id": run_id}).sort("step").to_list()

        return [(d["step"], unpack_metrics(d["body"])) for d in await self._run(work)]

    async def put_blob(self, content: bytes) -> str:
        if len(content) > BLOB_BYTES:
            raise StoreError(
                f"a blob of {len(content)} bytes is too large: MongoDB keeps at most {BLOB_BYTES} in one document;"
                " keep it in a file and store a reference"
            )
        blob = Blob(hashlib.sha256(content).hexdigest(), content)
        await self._put_blob(blob)
        return blob.sha256

    async def blob(self, sha256: str) -> bytes | None:
        found = await self._run(lambda: self._in("blobs").find_one({"_id": sha256}))
        return None if found is None else bytes(found["content"])

    async def cursor(self, follower: str) -> str | None:
        found = await self._run(lambda: self._in("cursors").find_one({"_id": follower}))
        return None if found is None else found["cursor"]

    async def set_cursor(self, follower: str, cursor: str) -> None:
        await self._replace("cursors", {"_id": follower, "cursor": cursor})

    # inside

    async def _put_blob(self, blob: Blob) -> None:
        async def work() -> None:
            try:
                await self._in("blobs").insert_one({"_id": blob.sha256, "content": blob.content})
            except DuplicateKeyError:  # the same content
                return

        await self._write(work)

    async def _blobs(self, wanted: Mapping[str, int]) -> dict[str, bytes]:
        blobs: dict[str, bytes] = {}
        for names in in_pieces(wanted, BATCH_BYTES):

            async def work(names: list[str] = names) -> list[Document]:
                return await self._in("blobs").find({"_id": {"$in": names}}).to_list()

            blobs |= {d["_id"]: bytes(d["content"]) for d in await self._run(work)}
        return blobs

    def _in(self, collection: str) -> AsyncCollection[Document]:
        if self._database is None:
            raise StoreError("the store is not open: use it inside `async with`")
        return self._database[collection]

    async def _make_indexes(self) -> None:
        with pymongo.timeout(
            CONNECT_S
        ):  # the client's own deadline would hold even for finding the server
            for collection, indexes in INDEXES.items():
                await self._in(collection).create_indexes(indexes)

    async def _insert(
        self, log: str, events: Sequence[Event], documents: Sequence[Document]
    ) -> None:
        """Insert events of one log in order, those that are there already left alone.

        Raises:
            LogRewoundError: another event is there. Nothing after it is inserted.
        """
        missing = list(documents)
        while missing:
            try:
                await self._insert_in_order(missing)
            except DuplicateKeyError:
                kept = await self._run(lambda: self._kept(log, events))
                check_same(log, events, kept)
                missing = [document for document in missing if document["seq"] not in kept]
            else:
                return

    async def _insert_in_order(self, documents: Sequence[Document]) -> None:
        async def work() -> None:
            try:
                await self._in("events").insert_many(documents, ordered=True)
            except BulkWriteError as error:
                if _only_duplicates(error):
                    raise DuplicateKeyError(str(error), DUPLICATE) from error
                raise

        await self._write(work)

    async def _kept(self, log: str, events: Sequence[Event]) -> dict[int, str]:
        seqs = [event.seq for event in events]
        wanted = {"log": log, "seq": {"$gte": min(seqs), "$lte": max(seqs)}}
        found = await self._in("events").find(wanted, {"seq": 1, "id": 1}).to_list()
        return {document["seq"]: document["id"] for document in found}

    async def _newest(self, collection: str, wanted: Document, limit: int) -> list[Document]:
        async def work() -> list[Document]:
            order = [("started", DESCENDING), ("_id", DESCENDING)]
            return await self._in(collection).find(wanted).sort(order).limit(limit).to_list()

        return [] if limit < 1 else await self._run(work)

    async def _page(self, run_id: str, after: str) -> list[Document]:
        async def work() -> list[Document]:
            wanted = {"run_id": run_id, "_id": {"$gt": after}}
            return (
                await self._in("rollouts").find(wanted).sort("_id").limit(ROWS_PER_PAGE).to_list()
            )

        return await self._run(work)

    async def _replace(self, collection: str, document: Document) -> None:
        async def work() -> None:
            same = {"_id": document["_id"]}
            try:
                await self._in(collection).replace_one(same, document, upsert=True)
            except DuplicateKeyError:  # two writers were first at once
                await self._in(collection).replace_one(same, document)

        await self._write(work)

    async def _replace_all(self, collection: str, requests: Sequence[ReplaceOne[Document]]) -> None:
        async def work() -> None:
            try:
                await self._in(collection).bulk_write(requests, ordered=False)
            except BulkWriteError as error:
                if not _only_duplicates(error):
                    raise
                # Two writers were first at once; by now both find what they replace.
                await self._in(collection).bulk_write(requests, ordered=False)

        await self._write(work)

    async def _write(self, work: Callable[[], Awaitable[object]]) -> None:
        """Run a write to its end or its deadline, whether or not the caller is cancelled meanwhile."""
        with anyio.CancelScope(shield=True):
            await self._run(work)

    async def _run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run an operation; the driver's errors become ours, save a duplicate key."""
        try:
            return await work()
        except DuplicateKeyError:
            raise
        except PyMongoError as error:
            raise _explain(error, self.url) from error


def _event_document(log: str, event: Event, body: bytes) -> Document:
    return {
        "_id": f"{log}:{event.seq}",
        "log": log,
        "seq": event.seq,
        "id": event.id,
        "type": event.type,
        "body": body,
    }


def _only_duplicates(error: BulkWriteError) -> bool:
    errors = cast("list[Document]", error.details.get("writeErrors", []))
    return bool(errors) and all(e.get("code") == DUPLICATE for e in errors)


def _explain(error: PyMongoError, url: str) -> StoreError | ConfigError:
    what = f"{error!s:.300}"
    if isinstance(error, DocumentTooLarge):
        return StoreError(f"store {url}: a document is too large: {what}")
    if isinstance(error, ConfigurationError):
        return ConfigError(f"store={url!r}: {what}")
    if isinstance(error, OperationFailure) and error.code in AUTHENTICATION_CODES:
        return StoreError(f"store {url}: refused; check user, password and rights: {what}")
    if isinstance(error, ConnectionFailure) or error.timeout:
        why, _, _ = what.partition(" (configured timeouts")
        return StoreUnavailableError(
            f"store {url} can't be reached: is the server running, and is the address right? ({why:.100})"
        )
    return StoreError(f"store {url}: {what}")
