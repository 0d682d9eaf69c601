"""What the entries of streams are made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from aworld_runtime.bus.redis.wire import Argument, Reply
from aworld_runtime.errors import MalformedEventError

BODY = b"e"
"""Field of a stream entry: the encoded event."""
FAILURES = b"f"
"""Field of a work entry that failed before: how often."""
DELIVERIES = b"d"
"""Field of a work entry that failed before, or of a dead letter: how often it was delivered."""
REASON = b"r"
"""Field of a dead letter."""
LOG = b"l"
"""Field of a dead letter that was mail: whose."""

SIZES = b"n"
"""Field of a log's entry that holds several events: the bytes of each."""

PACKED_FROM = 8
"""Events appended at once from which on they share entries: what is shared costs each later append a look at it."""
PACKED_BYTES = 16 * 1024
"""Of events in one entry, at most; a larger one stands alone."""

Entry = tuple[bytes, list[bytes]]
"""Id and fields of a stream entry."""


def entries(reply: Reply) -> list[Entry]:
    """The entries in the reply of XRANGE."""
    return [(entry_id, fields) for entry_id, fields in reply]


def position(entry_id: bytes) -> tuple[int, int]:
    """Where an entry stands in its stream: ids compare by number, not as text."""
    milliseconds, _, number = entry_id.partition(b"-")
    return int(milliseconds), int(number or 0)


class Kept(NamedTuple):
    """An event as a log keeps it."""

    seq: int
    body: bytes


def packed(bodies: Sequence[bytes]) -> Iterator[tuple[int, list[Argument]]]:
    """The entries of a log that hold these events: how many each has, and its fields.

    An entry of its own costs the server as much as three kilobytes do, so many events share some.
    """
    begin = size = 0
    shared = PACKED_BYTES if len(bodies) >= PACKED_FROM else 0
    for end, body in enumerate(bodies):
        if end > begin and size + len(body) > shared:
            yield _packed(bodies[begin:end])
            begin, size = end, 0
        size += len(body)
    if bodies:
        yield _packed(bodies[begin:])


def _packed(bodies: Sequence[bytes]) -> tuple[int, list[Argument]]:
    if len(bodies) == 1:
        return 1, [BODY, bodies[0]]
    return len(bodies), [BODY, b"".join(bodies), SIZES, " ".join(str(len(b)) for b in bodies)]


def unpacked(log: str, entry: Entry) -> list[Kept]:
    """The events in an entry of a log; its id is the seq of the last.

    Raises:
        MalformedEventError: it is not as `packed` makes them.
    """
    entry_id, fields = entry
    last = seq_of(entry_id)
    if len(fields) == 2 and fields[0] == BODY:
        return [Kept(last, fields[1])]
    values = dict(zip(fields[::2], fields[1::2], strict=True))
    body, sizes = values.get(BODY, b""), values.get(SIZES, b"").split()
    if not all(map(bytes.isdigit, sizes)) or sum(map(int, sizes)) != len(body) or not body:
        raise MalformedEventError(
            f"entry {entry_id.decode()} of log {log!r} is damaged: {fields!r:.100}"
        )
    kept: list[Kept] = []
    begin = 0
    for seq, size in enumerate(map(int, sizes), last - len(sizes) + 1):
        kept.append(Kept(seq, body[begin : begin + size]))
        begin += size
    return kept


def seq_of(entry_id: bytes) -> int:
    """Of the last event in an entry of a log."""
    return int(entry_id.partition(b"-")[0])
