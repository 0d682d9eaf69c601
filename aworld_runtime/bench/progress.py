"""What a long measurement says while it goes on, on stderr."""

from __future__ import annotations

import sys
import time

EVERY_S = 2.0


class Progress:
    """Lines that begin with `bench:`."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._next = 0.0

    def say(self, text: str) -> None:
        passed = time.monotonic() - self._began
        sys.stderr.write(f"bench: {passed:6.1f} s  {text}\n")
        sys.stderr.flush()

    def tick(self, text: str) -> None:
        """Say it, if nothing was for a while."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + EVERY_S
            self.say(text)
