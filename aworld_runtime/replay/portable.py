"""An episode or a run as one file: what is in it.

    manifest.json            what it is, and of every other member its size and sha256
    events/<log>.jsonl       one event a line: its JSON, beginning with its seq
    blobs/<sha256>           large data of events, as JSON, once: the line has "blob" where others have "data"
    rollouts.jsonl           a run's training rows, if the store has any

It is a zip: `unzip -p FILE events/episode:ID.jsonl | jq`. Records and metrics are folds of the logs and made again when
it is imported. Of a log that forks alone need, the events that they share are there (`prefix`). `export.py` writes such a
file, `importing.py` reads it.
"""

from __future__ import annotations

import hashlib
import re
from datetime import datetime
from typing import Final, Literal
from urllib.parse import quote

from pydantic import Field

from aworld_runtime.errors import MalformedEventError
from aworld_runtime.events import Event, Registry
from aworld_runtime.messages import Data
from aworld_runtime.payloads import APART_ABOVE, Blob

FORMAT: Final = 1
MANIFEST = "manifest.json"
ROLLOUTS = "rollouts.jsonl"
BLOBS = "blobs/"
MANIFEST_BYTES = 64 * 1024 * 1024
"""Enough for a quarter of a million logs; above that no file is written or read."""
EVENTS_AT_ONCE = 256
"""Events of a log in memory."""

_SEQ = re.compile(rb'\{"seq":([1-9]\d{0,17}),')
_APART = re.compile(rb',"blob":"([0-9a-f]{64})"\}$')


class Member(Data):
    """One of the files inside."""

    size: int = Field(ge=0)
    sha256: str


class Span(Data):
    """Which events of a log are inside: all from `first` to `last`."""

    first: int = Field(ge=1)
    last: int = Field(ge=1)
    prefix: bool = False
    """Only what forks share: it is no episode of its own here."""

    @property
    def events(self) -> int:
        return self.last - self.first + 1


class Manifest(Data):
    """What the file holds."""

    format: Literal[1] = FORMAT
    product: str
    """Version of what wrote it."""
    made: datetime
    kind: Literal["episode", "run"]
    id: str
    logs: dict[str, Span]
    """In the order in which they are imported: no fork before what it shares."""
    members: dict[str, Member]

    @property
    def events(self) -> int:
        return sum(span.events for span in self.logs.values())

    @property
    def summary(self) -> dict[str, str | int]:
        return {"kind": self.kind, "id": self.id, "logs": len(self.logs), "events": self.events}

    def __str__(self) -> str:
        logs = f"{len(self.logs):,} log{'s' * (len(self.logs) != 1)}"
        return f"{self.kind} {self.id}: {logs}, {self.events:,} events"


def log_member(log: str) -> str:
    """The name of the member that holds the log's events."""
    return f"events/{quote(log, safe=':@+ ')}.jsonl"


def write_line(event: Event) -> tuple[bytes, Blob | None]:
    """The event's line, and what stands apart from it."""
    raw = event.model_dump_json(exclude_defaults=True).encode()
    head = b'{"seq":%d,' % event.seq
    if len(raw) <= APART_ABOVE:
        return head + raw[1:] + b"\n", None
    envelope = event.model_dump_json(exclude_defaults=True, exclude={"data"}).encode()[:-1]
    data = raw[len(envelope + b',"data":') : -1]
    blob = Blob(hashlib.sha256(data).hexdigest(), data)
    return b'%s%s,"blob":"%s"}\n' % (head, envelope[1:], blob.sha256.encode()), blob


def blob_of(line: bytes) -> str | None:
    """The blob that a line refers to."""
    found = _APART.search(line, max(len(line) - 80, 0))
    return found and found[1].decode()


def read_line(line: bytes, data: bytes | None, registry: Registry) -> Event:
    """The event of a line; `data` is its blob, if it refers to one.

    Raises:
        EventError: it is none, or of a type that isn't known.
    """
    begin = _SEQ.match(line)
    if begin is None:
        raise MalformedEventError('a line begins with {"seq":')
    raw = b"{" + line[begin.end() :]
    if data is not None:
        raw = b'%s,"data":%s}' % (_APART.sub(b"", raw), data)
    return registry.decode(raw, seq=int(begin[1]))
