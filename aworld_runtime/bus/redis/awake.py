"""Patience is measured in time that this process has lived through.

One that was stopped for a minute (SIGSTOP, a paused machine) comes back with every deadline behind it, though it has tried
nothing meanwhile: a server that is well would be given up.
"""

from __future__ import annotations

import time

LONGEST_TRY_S = 6.0
"""An attempt ends sooner, with or without an answer. What lies longer between two looks at the clock was no patience."""


class Awake:
    """A clock that stands still while its process does. For who looks at it at every attempt."""

    def __init__(self) -> None:
        self._seen = time.monotonic()
        self._seconds = 0.0

    def now(self) -> float:
        """Seconds, of which only differences mean something."""
        now = time.monotonic()
        self._seconds += min(now - self._seen, LONGEST_TRY_S)
        self._seen = now
        return self._seconds
