"""What the entries of streams are made of."""

from __future__ import annotations

from aworld_runtime.bus.redis.wire import Reply

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

Entry = tuple[bytes, list[bytes]]
"""Id and fields of a stream entry."""


def entries(reply: Reply) -> list[Entry]:
    """The entries in the reply of XRANGE."""
    return [(entry_id, fields) for entry_id, fields in reply]


def position(entry_id: bytes) -> tuple[int, int]:
    """Where an entry stands in its stream: ids compare by number, not as text."""
    milliseconds, _, number = entry_id.partition(b"-")
    return int(milliseconds), int(number or 0)
