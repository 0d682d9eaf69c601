"""The server's clock, which all clients of a bus share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime

NOW = """
local function now()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end
"""
"""For scripts: milliseconds by the server's clock."""


class Clock:
    """As the server last told it. In between it goes on with this machine's monotonic clock, which nobody sets."""

    def __init__(self) -> None:
        self._ahead_s = time.time() - time.monotonic()

    def hear(self, reply: Sequence[bytes | int]) -> None:
        """Take in a reply to TIME: seconds, microseconds."""
        self._ahead_s = int(reply[0]) + int(reply[1]) / 1e6 - time.monotonic()

    def now(self) -> datetime:
        return datetime.fromtimestamp(time.monotonic() + self._ahead_s, UTC)
