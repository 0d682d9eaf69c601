"""Event buses: `memory://` in this process, Redis or Valkey for many."""

from aworld_runtime.bus.base import (
    Bus,
    Consumer,
    DeadLetter,
    Delivery,
    FeedEntry,
    Mail,
    NodeInfo,
    Subscription,
)
from aworld_runtime.bus.open import open_bus

__all__ = [
    "Bus",
    "Consumer",
    "DeadLetter",
    "Delivery",
    "FeedEntry",
    "Mail",
    "NodeInfo",
    "Subscription",
    "open_bus",
]
