"""Large content, apart from its event: what stands apart, and what is refused when it comes back."""

from __future__ import annotations

import random
import zlib

import pytest

from aworld_runtime.errors import MissingBlobError
from aworld_runtime.events import REFUSE_ABOVE, Event, MessagePosted, Registry
from aworld_runtime.payloads import (
    APART_ABOVE,
    APART_ABOVE_COMPRESSED,
    Blob,
    in_pieces,
    part,
    references,
)

REGISTRY = Registry()


def note(text: str) -> Event:
    return Event.of(MessagePosted(content=text), source="writer/1", episode_id="e")


def noise(size: int) -> str:
    """Text that compresses by half."""
    return random.Random(size).randbytes(size // 2).hex()


def encoded(event: Event) -> tuple[bytes, list[Blob]]:
    blobs: list[Blob] = []
    return REGISTRY.encode_apart(event, blobs), blobs


@pytest.mark.parametrize(
    "text",
    ["short", "x" * (APART_ABOVE - 1000), noise(APART_ABOVE_COMPRESSED)],
    ids=["small", "compresses well", "compresses badly"],
)
def test_what_is_not_large_stays_with_its_event(text: str) -> None:
    event = note(text)
    body, blobs = encoded(event)
    assert (body, blobs) == (REGISTRY.encode(event), [])


@pytest.mark.parametrize(
    "text",
    ["x" * APART_ABOVE, noise(3 * APART_ABOVE_COMPRESSED), 'ü"}}\\' * APART_ABOVE],
    ids=["compresses well", "compresses badly", "awkward"],
)
def test_large_content_stands_apart_and_comes_back_whole(text: str) -> None:
    event = note(text)
    body, [blob] = encoded(event)
    assert len(body) < 1000
    assert f'"id":"{event.id}"'.encode() in body
    assert references([body]) == {blob.sha256: len(blob.content)}
    assert REGISTRY.decode(body, seq=3, blobs=dict([blob])) == event.at(3)


def test_the_same_content_is_the_same_blob() -> None:
    (one,), (two,) = (encoded(note("x" * APART_ABOVE))[1] for _ in range(2))
    assert one == two


def test_a_missing_blob_is_named() -> None:
    body, [blob] = encoded(note("x" * APART_ABOVE))
    with pytest.raises(MissingBlobError, match=f"{blob.sha256} of {len(blob.content)} bytes"):
        REGISTRY.decode(body)


def test_a_blob_that_is_not_what_its_name_says_is_refused() -> None:
    body, [blob] = encoded(note("x" * APART_ABOVE))
    forged = encoded(note("y" * APART_ABOVE))[1][0].content
    with pytest.raises(MissingBlobError, match=f"{blob.sha256}, is damaged"):
        REGISTRY.decode(body, blobs={blob.sha256: forged})


def test_a_blob_that_inflates_to_more_than_an_event_may_hold_is_refused() -> None:
    stub, _ = part(b'{"id":"1","data":' + b"x" * REFUSE_ABOVE + b"}", b'{"id":"1"}')
    blob = zlib.compress(b"x" * REFUSE_ABOVE, 1)
    [name] = references([stub])
    with pytest.raises(MissingBlobError, match="more than"):
        REGISTRY.decode(stub, blobs={name: blob})


def test_blobs_are_asked_for_in_pieces() -> None:
    wanted = {"a": 3, "b": 4, "c": 4, "d": 20, "e": 1}
    assert list(in_pieces(wanted, 8)) == [["a", "b"], ["c"], ["d"], ["e"]]
    assert list(in_pieces({}, 8)) == []
