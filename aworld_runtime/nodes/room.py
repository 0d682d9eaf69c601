"""A bus that has no room: how nodes send to it, and give up on deliveries."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from aworld_runtime.bus.base import Delivery
from aworld_runtime.errors import BusFullError
from aworld_runtime.tools.call import told

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


async def try_again(delivery: Delivery, error: BaseException) -> bool:
    """It failed: later again, if it may; where the bus is full, when its lease runs out."""
    reason = f"{type(error).__name__}: {told(error)}"
    logger.warning("%s on queue %s failed: %s", delivery.event.type, delivery.queue, reason)
    try:
        return await delivery.retry(None, reason)
    except BusFullError as full:
        logger.warning("%s waits for its lease to run out: %s", delivery.event.type, full)
        return True


async def bury(delivery: Delivery, reason: str) -> None:
    """Make it a dead letter; where the bus is full, its lease runs out and it comes again."""
    try:
        await delivery.dead_letter(reason)
    except BusFullError as error:
        logger.warning("%s is not among the dead letters yet: %s", delivery.event.type, error)
    else:
        logger.warning(
            "%s on queue %s is a dead letter: %s", delivery.event.type, delivery.queue, reason
        )
