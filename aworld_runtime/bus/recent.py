"""What a listener to broadcasts has heard and not read yet."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

MOST = 1024
MOST_BYTES = 16 * 1024 * 1024

T = TypeVar("T")


class Recent(Generic[T]):
    """Holds the last messages: where they are too many or too large, the oldest fall out."""

    def __init__(self) -> None:
        self._messages: deque[tuple[T, int]] = deque()
        self._bytes = 0

    def __bool__(self) -> bool:
        return bool(self._messages)

    def add(self, message: T, size: int) -> None:
        self._messages.append((message, size))
        self._bytes += size
        while len(self._messages) > MOST or (self._bytes > MOST_BYTES and len(self._messages) > 1):
            self.oldest()

    def oldest(self) -> T:
        """Taken out."""
        message, size = self._messages.popleft()
        self._bytes -= size
        return message
