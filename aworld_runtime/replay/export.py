"""Write an episode or a run, with all that it takes to replay it, into one file.

    store ──▶ events, a page at a time ──▶ blobs into the zip, lines aside ──▶ the log's member ──▶ manifest ──▶ rename

What is in memory doesn't grow with the run, but for a few hundred bytes for each of its logs.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from tempfile import SpooledTemporaryFile

import anyio

from aworld_runtime import __version__
from aworld_runtime.errors import ConfigError, MissingParentError, NotFoundError, StoreError
from aworld_runtime.events import EpisodeForked, Event, utc_now
from aworld_runtime.names import episode_log, episode_of_log, run_of_log
from aworld_runtime.replay.portable import (
    BLOBS,
    EVENTS_AT_ONCE,
    MANIFEST,
    MANIFEST_BYTES,
    ROLLOUTS,
    Manifest,
    Member,
    Span,
    log_member,
    write_line,
)
from aworld_runtime.store.base import Store

ASIDE_BYTES = 8 * 1024 * 1024
"""Of a log's lines in memory, before they go to a temporary file."""
CHUNK = 1024 * 1024


async def export(
    store: Store,
    log: str,
    path: Path,
    *,
    force: bool = False,
    tell: Callable[[int], object] = lambda _: None,
) -> Manifest:
    """Write what the store has of the episode or run whose log is `log`. `tell` hears how many events are written.

    Raises:
        NotFoundError: the store has no such log.
        ConfigError: the file is there and `force` is not given, or it can't be written.
        MissingParentError: the store lacks what a fork shares with its parent.
        StoreError: a log has a gap.
    """
    if not force and await anyio.Path(path).exists():
        raise ConfigError(f"{path} is there: name another file, or overwrite it with --force")
    aside = path.with_name(f".{path.name}.{token_hex(4)}.partial")
    try:
        with zipfile.ZipFile(aside, "x", zipfile.ZIP_DEFLATED) as archive:
            manifest = await _Export(store, archive, tell).write(log)
        aside.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            aside.unlink()
    return manifest


class _Export:
    """One file while it is written."""

    def __init__(
        self, store: Store, archive: zipfile.ZipFile, tell: Callable[[int], object]
    ) -> None:
        self._store = store
        self._archive = archive
        self._tell = tell
        self._told = 0
        self._members: dict[str, Member] = {}
        self._logs: dict[str, Span] = {}
        self._forks: list[EpisodeForked] = []

    async def write(self, log: str) -> Manifest:
        run_id = run_of_log(log)
        if not await self._store.last_seq(log):
            raise NotFoundError(f"no events of {log} in {self._store.url}")
        if run_id is not None:
            async for record in self._store.run_episodes(run_id):
                await self._log(episode_log(record.id))
            await self._rollouts(run_id)
        await self._log(log)
        own, self._logs = self._logs, {}
        for parent, last in (await self._prefixes(own)).items():
            await self._log(parent, last)
        manifest = Manifest(
            product=f"aworld-rt {__version__}",
            made=utc_now(),
            kind="episode" if run_id is None else "run",
            id=run_id or episode_of_log(log) or "",
            logs=self._logs | own,
            members=self._members,
        )
        text = manifest.model_dump_json(indent=1).encode()
        if len(text) > MANIFEST_BYTES:
            raise ConfigError(f"{len(manifest.logs)} logs are too many for one file")
        self._archive.writestr(MANIFEST, text)
        return manifest

    async def _log(self, log: str, last: int | None = None) -> None:
        """Write the log's member, and the blobs that its events refer to; `last` is the end of a prefix."""
        first = seq = 0
        with SpooledTemporaryFile(max_size=ASIDE_BYTES) as lines:
            async for event in self._read(log, last):
                line, blob = write_line(event)
                lines.write(line)
                if blob is not None and (name := BLOBS + blob.sha256) not in self._members:
                    self._write(name, [blob.content])
                first, seq = first or event.seq, event.seq
            if seq:
                lines.seek(0)
                self._write(log_member(log), iter(lambda: lines.read(CHUNK), b""))
                self._logs[log] = Span(first=first, last=seq, prefix=last is not None)

    async def _read(self, log: str, last: int | None) -> AsyncIterator[Event]:
        seq = 0
        while page := await self._store.read(log, seq + 1, limit=EVENTS_AT_ONCE):
            for event in page:
                if last is not None and event.seq > last:
                    return
                forked = event.data if isinstance(event.data, EpisodeForked) else None
                if not seq and forked and event.seq == forked.at + 1:
                    self._forks.append(forked)
                elif event.seq != seq + 1:
                    raise StoreError(
                        f"{self._store.url} lacks events {seq + 1} to {event.seq - 1} of {log}"
                    )
                seq = event.seq
                yield event
            self._told += len(page)
            self._tell(self._told)

    async def _prefixes(self, own: Mapping[str, Span]) -> dict[str, int]:
        """The logs that are not among the `own` of what is exported and from which it was forked, and how far they are shared."""
        wanted: dict[str, int] = {}
        forks = list(self._forks)
        while forks:
            fork = forks.pop()
            parent, at = fork.parent, fork.at
            if parent in own or wanted.get(parent, 0) >= at:
                continue
            there = await self._store.read(parent, limit=1)
            if not there or await self._store.last_seq(parent) < at:
                raise MissingParentError(
                    f"{self._store.url} lacks events of {parent} up to {at}, from which an episode was forked"
                )
            first = there[0]
            wanted[parent] = max(at, first.seq)
            if isinstance(first.data, EpisodeForked):
                forks.append(first.data)
        return wanted

    async def _rollouts(self, run_id: str) -> None:
        rows = self._store.rollouts(run_id)
        with SpooledTemporaryFile(max_size=ASIDE_BYTES) as lines:
            async for row in rows:
                lines.write(row.model_dump_json().encode() + b"\n")
            if lines.tell():
                lines.seek(0)
                self._write(ROLLOUTS, iter(lambda: lines.read(CHUNK), b""))

    def _write(self, name: str, chunks: Iterable[bytes]) -> None:
        digest, size = hashlib.sha256(), 0
        with self._archive.open(name, "w", force_zip64=True) as member:
            for chunk in chunks:
                member.write(chunk)
                digest.update(chunk)
                size += len(chunk)
        self._members[name] = Member(size=size, sha256=digest.hexdigest())
