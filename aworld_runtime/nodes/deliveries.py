"""Deliveries that failed: how nodes have them come again, or give up on them."""

from __future__ import annotations

import logging

from aworld_runtime.bus.base import Delivery
from aworld_runtime.errors import BusFullError
from aworld_runtime.tools.call import told

logger = logging.getLogger(__name__)


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
