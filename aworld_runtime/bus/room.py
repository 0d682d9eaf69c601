"""A bus that has no room: how to send to it."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from aworld_runtime.errors import BusFullError

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
"""Between two tries; each pause is of chance, so that those who wait don't all come back at once."""

T = TypeVar("T")


async def when_there_is_room(
    send: Callable[[], Awaitable[T]], *, who: str, patience_s: float = math.inf
) -> T:
    """Send to the bus; where it is full, the very same again until it isn't.

    An episode's time goes on meanwhile: when it is up, what is left to send is the end.

    Raises:
        BusFullError: it still is after `patience_s`.
    """
    deadline = anyio.current_time() + patience_s
    longest_s = FIRST_PAUSE_S
    while True:
        try:
            return await send()
        except BusFullError as error:
            if anyio.current_time() >= deadline:
                raise
            if longest_s == FIRST_PAUSE_S:
                logger.warning("%s waits until there is room: %s", who, error)
        await anyio.sleep(random.uniform(longest_s / 2, longest_s))
        longest_s = min(2 * longest_s, LONGEST_PAUSE_S)
