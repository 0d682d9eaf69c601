"""Leases are renewed from a thread of its own, so that a busy event loop does not lose them.

    run (thread): every quarter of the shortest lease ─▶ one pipeline ─▶ the lost ones are marked

It has a client of its own and shares nothing with the loop but the held work.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, cast

import redis
from redis.backoff import NoBackoff
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry

from aworld_runtime import telemetry
from aworld_runtime.bus.redis.scripts import RENEW
from aworld_runtime.bus.redis.wire import Address

logger = logging.getLogger(__name__)

BEATS_PER_LEASE = 4
ANSWER_S = 1.0


class Loseable(Protocol):
    """What the heartbeat knows of a piece of work."""

    lost: bool


@dataclass(eq=False)
class Lease:
    """One consumer's leases."""

    work: bytes
    """Key of the queue's stream."""
    consumer: str
    lease_s: float
    held: Mapping[bytes, Loseable]
    """Id → what is held now; changed by the event loop, read here."""
    renewing: bool = True
    """False: look only, as after an abandoned consumer's death."""


class Heartbeat:
    """The thread; it starts with the first lease. Nothing is renewed after `stop`."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._leases: list[Lease] = []
        self._changed = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def add(self, lease: Lease) -> None:
        """Renew these from now on."""
        self._leases = [*self._leases, lease]
        self._changed.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="aworld-leases", daemon=True)
            self._thread.start()

    def remove(self, lease: Lease) -> None:
        """Renew these no longer."""
        self._leases = [other for other in self._leases if other is not lease]

    def stop(self) -> None:
        """End the thread; waits for it."""
        self._stopping = True
        self._changed.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        client = redis.Redis.from_url(
            self._address.server_url,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=ANSWER_S,
            socket_connect_timeout=ANSWER_S,
            maint_notifications_config=MaintNotificationsConfig(enabled=False),
        )
        with client:
            while not self._stopping:
                shortest_s = min((lease.lease_s for lease in self._leases), default=None)
                self._changed.wait(shortest_s and shortest_s / BEATS_PER_LEASE)
                self._changed.clear()
                try:
                    self._beat(client)
                except redis.RedisError as error:
                    logger.warning("leases not renewed, trying again: %s", error)

    def _beat(self, client: redis.Redis) -> None:
        asked: list[tuple[Lease, list[bytes]]] = []
        # Not a transaction: a pipeline for the round trip alone.
        with client.pipeline(transaction=False) as pipeline:
            evaluate = cast("Callable[..., object]", pipeline.eval)
            for lease in self._leases:
                if ids := list(lease.held):
                    mode = b"1" if lease.renewing else b"0"
                    evaluate(RENEW, 1, lease.work, lease.consumer, mode, *ids)
                    asked.append((lease, ids))
            replies = cast("list[list[bytes]]", pipeline.execute(raise_on_error=True))
        for (lease, _), lost in zip(asked, replies, strict=True):
            for entry_id in lost:
                if (work := lease.held.get(entry_id)) and not work.lost:
                    work.lost = True
                    telemetry.LOST_LEASES.add()
