"""How far long work has come, told on stderr."""

from __future__ import annotations

import sys
import time

EVERY_S = 5.0


class Progress:
    """Called with how many events are done; says so from time to time."""

    def __init__(self, done: str) -> None:
        self._done = done
        self._told = time.monotonic()

    def __call__(self, events: int) -> None:
        now = time.monotonic()
        if now - self._told >= EVERY_S:
            self._told = now
            print(f"{self._done} {events:,} events", file=sys.stderr, flush=True)
