"""Large content, apart from the event it belongs to.

    event   {"id":…,"type":…,"data":{…}}
    stub   b{"id":…,"type":…,"data":{"blob":"<sha256>","size":…}}
    blob    the JSON of `data`, compressed; its name is the sha256 of these bytes, so the same content is one blob

What keeps a log keeps stub and blob, and puts them together when it reads. Nothing here does I/O.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from aworld_runtime.errors import MissingBlobError

APART_ABOVE = 64 * 1024
"""Bytes of JSON above which an event's content stands apart."""
APART_ABOVE_COMPRESSED = 16 * 1024
"""The same for what compresses badly."""
STUB = b"b"
"""First byte of a stub."""
_REFERENCE = re.compile(rb'\{"blob":"([0-9a-f]{64})","size":(\d{1,9})\}\}$')
_REFERENCE_BYTES = 110
NONE: Mapping[str, bytes] = {}


class Blob(NamedTuple):
    """Content by its name."""

    sha256: str
    content: bytes


class Reference(NamedTuple):
    """What a stub says about its blob."""

    sha256: str
    size: int
    """Bytes of the blob."""
    begin: int
    """Where it stands in the stub."""


def part(raw: bytes, envelope: bytes) -> tuple[bytes, Blob]:
    """Take the data out of an event's JSON. `envelope` is the same JSON without it, which comes last."""
    head = envelope[:-1] + b',"data":'
    if not raw.startswith(head):
        raise ValueError("the data of an event must be the last of its fields")
    content = zlib.compress(raw[len(head) : -1], 1)
    blob = Blob(hashlib.sha256(content).hexdigest(), content)
    return b'%s%s{"blob":"%s","size":%d}}' % (STUB, head, blob.sha256.encode(), len(content)), blob


def reference(body: bytes) -> Reference | None:
    """The blob that a stub refers to; None for what is no stub."""
    if body[:1] != STUB:
        return None
    found = _REFERENCE.search(body, max(len(body) - _REFERENCE_BYTES, 0))
    return found and Reference(found[1].decode(), int(found[2]), found.start())


def references(bodies: Iterable[bytes]) -> dict[str, int]:
    """The blobs that these bodies refer to, with their sizes."""
    found = (reference(body) for body in bodies if body[:1] == STUB)
    return {r.sha256: r.size for r in found if r is not None}


def in_pieces(wanted: Mapping[str, int], most: int) -> Iterator[list[str]]:
    """Names of blobs, each time so many that they have at most `most` bytes, but at least one."""
    names: list[str] = []
    room = most
    for name, size in wanted.items():
        if names and size > room:
            yield names
            names, room = [], most
        names.append(name)
        room -= size
    if names:
        yield names


def whole(body: bytes, blobs: Mapping[str, bytes], most: int) -> bytes:
    """The JSON of a stub's event, of no more than `most` bytes.

    Raises:
        MissingBlobError: the blob is not among `blobs`, or not what its name says.
    """
    refers = reference(body)
    if refers is None:
        return body
    content = blobs.get(refers.sha256)
    if content is None:
        raise MissingBlobError(
            f"the event's content, blob {refers.sha256} of {refers.size} bytes, is missing: it was lost, or freed"
            " before its event"
        )
    actual = hashlib.sha256(content).hexdigest()
    if actual != refers.sha256:
        raise MissingBlobError(
            f"the event's content, blob {refers.sha256}, is damaged: what is there has sha256 {actual}"
        )
    inflater = zlib.decompressobj()
    head = body[len(STUB) : refers.begin]
    data = inflater.decompress(content, most - len(head))
    if inflater.unconsumed_tail or not inflater.eof:
        raise MissingBlobError(
            f"the event's content, blob {refers.sha256}, is cut or holds more than {most} bytes"
        )
    return head + data + b"}"
