"""An exported file, read: nothing of it is believed before it is checked.

Names, sizes and sums are compared with the manifest, each event is decoded, and nothing is unpacked to disk or larger than the
manifest says. What is wrong is told with the member that it is in.
"""

from __future__ import annotations

import hashlib
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Self

import pydantic_core
from anyio.lowlevel import checkpoint

from aworld_runtime.errors import (
    ConfigError,
    DamagedFileError,
    EventError,
    NotFoundError,
    UnknownEventTypeError,
)
from aworld_runtime.events import REFUSE_ABOVE, EpisodeForked, Event, Registry
from aworld_runtime.names import episode_log, episode_of_log, run_log, run_of_log
from aworld_runtime.replay.portable import (
    BLOBS,
    EVENTS_AT_ONCE,
    FORMAT,
    MANIFEST,
    MANIFEST_BYTES,
    ROLLOUTS,
    Manifest,
    Member,
    blob_of,
    log_member,
    read_line,
)
from aworld_runtime.store.base import RolloutRow

CHUNK = 1024 * 1024
PAGE_BYTES = 16 * 1024 * 1024
"""Events of a log in memory, as `EVENTS_AT_ONCE`."""
LINE_BYTES = REFUSE_ABOVE + 1024
ROW_BYTES = 64 * 1024 * 1024
"""More than a training row can have."""
ZIP_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    OSError,
    RuntimeError,
    ValueError,
    OverflowError,
    LookupError,
)
"""What reading a damaged zip ends with."""
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_SHA256 = re.compile("[0-9a-f]{64}")


class ExportedFile:
    """An exported file, open inside `with`. `check` it before you use what is inside.

    Raises:
        NotFoundError: no such file.
        DamagedFileError: it is none, cut, or of a newer format.
    """

    manifest: Manifest

    def __init__(self, path: Path, registry: Registry) -> None:
        self.path = path
        self._registry = registry

    def __enter__(self) -> Self:
        if not self.path.is_file():
            raise NotFoundError(f"no file {self.path}")
        try:
            self._archive = zipfile.ZipFile(self.path)
        except PermissionError as error:
            raise ConfigError(f"{self.path} can't be read: {error.strerror}") from error
        except ZIP_ERRORS as error:
            raise DamagedFileError(
                f"{self.path} is no exported file, or it is cut: {error}"
            ) from error
        try:
            self.manifest = self._read_manifest()
            self._check_names()
        except BaseException:
            self._archive.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._archive.close()

    async def check(self, tell: Callable[[int], object] = lambda _: None) -> None:
        """Read all of it; `tell` hears of how many events.

        Raises:
            DamagedFileError: something is wrong; names the member.
            UnknownEventTypeError: an event's type is not in the registry.
        """
        for name in self.manifest.members:
            if name.startswith(BLOBS):
                self._content(name)
                await checkpoint()
        events = 0
        for log in self.manifest.logs:
            for page in self.pages(log):
                events += len(page)
                tell(events)
                await checkpoint()
        for _ in self.rows():
            await checkpoint()

    def pages(self, log: str) -> Iterator[list[Event]]:
        """The log's events, so many at a time that they fit in memory."""
        name, span = log_member(log), self.manifest.logs[log]
        seq, size = span.first, 0
        page: list[Event] = []
        for number, line in enumerate(self._lines(name, LINE_BYTES), 1):
            where, blob = f"{name}, line {number}", blob_of(line)
            event = self._event(line, blob, where)
            if event.seq != seq:
                raise self._damaged(where, f"it is event {event.seq}; expected {seq}")
            if seq == span.first:
                self._check_beginning(event, where)
            page.append(event)
            seq, size = seq + 1, size + len(line)
            if blob is not None:
                size += self.manifest.members[BLOBS + blob].size
            if len(page) == EVENTS_AT_ONCE or size > PAGE_BYTES:
                yield page
                page, size = [], 0
        if seq != span.last + 1:
            raise self._damaged(name, f"it ends with event {seq - 1}, not {span.last}")
        if page:
            yield page

    def rows(self) -> Iterator[RolloutRow]:
        """The run's training rows."""
        if ROLLOUTS not in self.manifest.members:
            return
        for number, line in enumerate(self._lines(ROLLOUTS, ROW_BYTES), 1):
            try:
                yield RolloutRow.model_validate_json(line)
            except ValueError as error:
                raise self._damaged(f"{ROLLOUTS}, line {number}", str(error)) from error

    # inside

    def _read_manifest(self) -> Manifest:
        if MANIFEST not in self._archive.namelist():
            raise DamagedFileError(f"{self.path} is a zip, but no exported file: no {MANIFEST}")
        text = b"".join(self._chunks(MANIFEST, MANIFEST_BYTES))
        try:
            match pydantic_core.from_json(text):
                case {"format": int(newer), "product": product} if newer > FORMAT:
                    raise DamagedFileError(
                        f"{self.path} has format {newer}, by {product!s:.40}; this version reads up to {FORMAT}: upgrade"
                    )
                case fields:
                    return Manifest.model_validate(fields)
        except ValueError as error:
            raise self._damaged(MANIFEST, str(error)) from error

    def _check_names(self) -> None:
        """The manifest names what is there, and nothing is there that isn't named."""
        manifest = self.manifest
        names = self._archive.namelist()
        expected = {ROLLOUTS, *map(log_member, manifest.logs)}
        for name, member in manifest.members.items():
            if name not in expected and not self._is_blob(name, member):
                raise self._damaged(MANIFEST, f"it names {name!r:.100}")
        for name in sorted({*map(log_member, manifest.logs), *manifest.members} - {*names}):
            raise self._damaged(name, "it is missing")
        for name in sorted({*names} - {MANIFEST, *manifest.members}):
            raise self._damaged(f"{name!r:.100}", "the manifest doesn't name it")
        if len(names) > len({*names}):
            raise self._damaged(MANIFEST, "some members are there twice")
        for log, span in manifest.logs.items():
            if not (episode_of_log(log) or run_of_log(log)) or span.last < span.first:
                raise self._damaged(MANIFEST, f"no log is {log!r:.100} with {span}")
        log_of = episode_log if manifest.kind == "episode" else run_log
        if (whole := manifest.logs.get(log_of(manifest.id))) is None or whole.prefix:
            raise self._damaged(
                MANIFEST, f"the log of {manifest.kind} {manifest.id!r:.100} is missing"
            )

    def _is_blob(self, name: str, member: Member) -> bool:
        sha256 = name.removeprefix(BLOBS)
        return sha256 != name and bool(_SHA256.fullmatch(sha256)) and member.sha256 == sha256

    def _event(self, line: bytes, blob: str | None, where: str) -> Event:
        if blob is not None and BLOBS + blob not in self.manifest.members:
            raise self._damaged(where, f"its content, {BLOBS}{blob}, is missing")
        data = None if blob is None else self._content(BLOBS + blob)
        try:
            return read_line(line, data, self._registry)
        except UnknownEventTypeError as error:
            raise UnknownEventTypeError(f"{self.path}: {where}: {error}") from error
        except EventError as error:
            raise self._damaged(where, str(error)) from error

    def _check_beginning(self, first: Event, where: str) -> None:
        """A log begins with event 1, or as a fork of what is here, too."""
        if first.seq == 1:
            return
        if not isinstance(first.data, EpisodeForked) or first.data.at != first.seq - 1:
            raise self._damaged(where, f"the log begins with event {first.seq}, and is no fork")
        parent, at = first.data.parent, first.data.at
        if parent not in self.manifest.logs or self.manifest.logs[parent].last < at:
            raise self._damaged(where, f"it is a fork of {parent} at {at}, which is missing")

    def _content(self, name: str) -> bytes:
        """A blob."""
        return b"".join(self._checked(name, REFUSE_ABOVE))

    def _lines(self, name: str, most: int) -> Iterator[bytes]:
        """The member's lines, of at most `most` bytes each."""
        rest = b""
        for chunk in self._checked(name):
            *lines, rest = (rest + chunk).split(b"\n")
            yield from lines
            if len(rest) > most:
                break
        if rest:
            raise self._damaged(name, f"a line is longer than {most} bytes, or has no end")

    def _checked(self, name: str, most: int | None = None) -> Iterator[bytes]:
        """The member's bytes: the size and the sum come last, so that all of it has to be read."""
        member = self.manifest.members[name]
        digest = hashlib.sha256()
        for chunk in self._chunks(name, member.size if most is None else min(most, member.size)):
            digest.update(chunk)
            yield chunk
        if digest.hexdigest() != member.sha256:
            raise self._damaged(name, "it is damaged: its sha256 is not that of the manifest")

    def _chunks(self, name: str, most: int) -> Generator[bytes]:
        """The member's bytes; never more than `most`."""
        with self._telling(name):
            info = self._archive.getinfo(name)
            if info.compress_type not in METHODS:
                raise self._damaged(name, f"it is compressed by method {info.compress_type}")
            file = self._archive.open(info)
        with closing(file):
            read = 0
            while True:
                with self._telling(name):
                    chunk = file.read(min(CHUNK, most - read + 1))
                if not chunk:
                    return
                read += len(chunk)
                if read > most:
                    raise self._damaged(name, f"it has more than {most} bytes")
                yield chunk

    @contextmanager
    def _telling(self, name: str) -> Generator[None]:
        try:
            yield
        except ZIP_ERRORS as error:
            raise self._damaged(name, f"it is damaged: {error}") from error

    def _damaged(self, where: str, what: str) -> DamagedFileError:
        return DamagedFileError(f"{self.path}: {where}: {' '.join(what.split()):.300}")
