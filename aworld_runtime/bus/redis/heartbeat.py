"""Leases are renewed from a thread of its own, so that a busy event loop does not lose them.

    run (a thread for each server): every quarter of the shortest lease ─▶ one pipeline ─▶ the lost ones are marked

Each has a client of its own and shares nothing with the loop but the held work. A server that stands
still makes its own leases late, not another's.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, cast

import redis
from redis.backoff import NoBackoff
from redis.exceptions import AskError
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry

from aworld_runtime import telemetry
from aworld_runtime.bus.redis.link import Link
from aworld_runtime.bus.redis.scripts.queues import RENEW
from aworld_runtime.bus.redis.wire import at_place

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
    """The threads; one starts with the first lease at its server. Nothing is renewed after `stop`."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._leases: list[Lease] = []
        self._threads: dict[str, tuple[threading.Thread, threading.Event]] = {}
        """By the server's URL; the event ends a pause."""
        self._starting = threading.Lock()
        self._stopping = False

    def add(self, lease: Lease) -> None:
        """Renew these from now on."""
        self._leases = [*self._leases, lease]
        self._start(self._link.place(lease.work).server_url)
        self._wake()

    def remove(self, lease: Lease) -> None:
        """Renew these no longer."""
        self._leases = [other for other in self._leases if other is not lease]

    def stop(self) -> None:
        """End the threads; waits for them."""
        with self._starting:
            self._stopping = True
        self._wake()
        for thread, _ in self._threads.values():
            thread.join()
        self._threads.clear()

    def _start(self, server_url: str) -> None:
        with self._starting:
            if server_url in self._threads or self._stopping:
                return
            changed = threading.Event()
            arguments = (server_url, changed)
            thread = threading.Thread(
                target=self._run, args=arguments, name="aworld-leases", daemon=True
            )
            self._threads[server_url] = (thread, changed)
            thread.start()

    def _wake(self) -> None:
        for _, changed in tuple(self._threads.values()):
            changed.set()

    def _run(self, server_url: str, changed: threading.Event) -> None:
        failing = False
        with _client(server_url) as client:
            while not self._stopping:
                shortest_s = min((lease.lease_s for lease in self._leases), default=None)
                changed.wait(shortest_s and shortest_s / BEATS_PER_LEASE)
                changed.clear()
                try:
                    self._beat(client, server_url, self._leases_at(server_url))
                    failing = False
                except redis.RedisError as error:
                    self._link.doubt()
                    level = logging.DEBUG if failing else logging.WARNING  # once is enough
                    logger.log(level, "leases not renewed, trying again: %s", error)
                    failing = True

    def _leases_at(self, server_url: str) -> list[Lease]:
        found: list[Lease] = []
        for lease in self._leases:
            place = self._link.place(lease.work).server_url
            if place == server_url:
                found.append(lease)
            else:
                self._start(place)  # its slot may just have moved there
        return found

    def _beat(
        self, client: redis.Redis, server_url: str, leases: list[Lease], *, asking: bool = False
    ) -> None:
        asked: list[tuple[Lease, list[bytes]]] = []
        # Not a transaction: a pipeline for the round trip alone.
        with client.pipeline(transaction=False) as pipeline:
            execute = cast("Callable[..., object]", pipeline.execute_command)
            for lease in leases:
                if ids := list(lease.held):
                    mode = b"1" if lease.renewing else b"0"
                    if asking:
                        execute("ASKING")
                    execute("EVAL", RENEW, 1, lease.work, lease.consumer, mode, *ids)
                    asked.append((lease, ids))
            replies = cast("list[object]", pipeline.execute(raise_on_error=False))
        if asking:
            replies = replies[1::2]
        errors: list[redis.RedisError] = []
        for (lease, _), reply in zip(asked, replies, strict=True):
            if isinstance(reply, AskError) and not asking:
                with _client(at_place(server_url, f"{reply.host}:{reply.port}")) as other:
                    self._beat(other, server_url, [lease], asking=True)
            elif isinstance(reply, redis.RedisError):
                errors.append(reply)
            else:
                for entry_id in cast("list[bytes]", reply):
                    if (work := lease.held.get(entry_id)) and not work.lost:
                        work.lost = True
                        telemetry.LOST_LEASES.add()
        if errors:
            raise errors[0]


def _client(server_url: str) -> redis.Redis:
    return redis.Redis.from_url(
        server_url,
        protocol=2,
        retry=Retry(NoBackoff(), 0),
        socket_timeout=ANSWER_S,
        socket_connect_timeout=ANSWER_S,
        maint_notifications_config=MaintNotificationsConfig(enabled=False),
    )
