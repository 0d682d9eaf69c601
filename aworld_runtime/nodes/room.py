"""Waiting while a bus is full."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from aworld_runtime.errors import BusFullError

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
"""Between two tries to send to a bus that is full."""

T = TypeVar("T")


async def when_there_is_room(send: Callable[[], Awaitable[T]], *, who: str) -> T:
    """Send to the bus; where it is full, the very same again until it isn't.

    An episode's time goes on meanwhile: when it is up, what is left to send is the end.
    """
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return await send()
        except BusFullError as error:
            if pause_s == FIRST_PAUSE_S:
                logger.warning("%s waits until there is room: %s", who, error)
        await anyio.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
