"""Events as the server keeps them: encoded, and signed for their place where there is a key.

In a log the place is the seq, so nothing in it can be moved or repeated; elsewhere it is the queue, the log whose mail it is,
or the request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aworld_runtime.bus.base import DEAD_MAIL
from aworld_runtime.bus.redis.entries import Kept
from aworld_runtime.errors import ForgedEventError
from aworld_runtime.events import Event, Registry
from aworld_runtime.names import tool_of_queue
from aworld_runtime.payloads import Blob
from aworld_runtime.signatures import SIGNED, Signer

APPENDED_KEPT = 2048
"""Appended events whose bytes are kept in case they are sent on; the oldest are given up first."""


def mail(log: str) -> str:
    """The place of a log's mail."""
    return f"mail:{log}"


def queue(name: str) -> str:
    return f"queue:{name}"


def reply(request_id: str) -> str:
    return f"reply:{request_id}"


def letter(name: str, log: str | None) -> str:
    """Where a dead letter of queue `name` came from."""
    return queue(name) if log is None or name != DEAD_MAIL else mail(log)


class Codec:
    """Of one bus."""

    def __init__(self, registry: Registry, namespace: str, signer: Signer | None) -> None:
        self._registry = registry
        self._namespace = namespace
        self._signer = signer
        self._appended: dict[int, tuple[Event, bytes]] = {}
        """Small events that were appended lately, by identity: much of that is sent on at once."""

    def encode(self, event: Event, place: str) -> bytes:
        """For a queue, mail or a reply."""
        appended = self._appended.pop(id(event), None)
        if appended is not None and appended[0] is event:
            body = appended[1]
        else:
            body = self._registry.encode(event)
        if self._signer is None:
            return body
        return self._signer.sign(body, self._bytes(place), role=event.role, reader=_reader(place))

    def encode_in_log(self, event: Event, log: str, seq: int, blobs: list[Blob]) -> bytes:
        """For a log; large content is added to `blobs`."""
        body = self._registry.encode_apart(event, blobs)
        if body[:1] == b"{":  # it is whole, and no larger than `COMPRESS_ABOVE`
            if len(self._appended) >= APPENDED_KEPT:
                del self._appended[next(iter(self._appended))]
            self._appended[id(event)] = (event, body)
        if self._signer is None:
            return body
        return self._signer.sign(body, self._bytes(_in_log(log, seq)), role=event.role)

    def decode(self, body: bytes, place: str) -> Event:
        """What a queue, mail or a reply holds.

        Raises:
            EventError: it can't be read; `ForgedEventError` where its signature is not that of its role.
        """
        if self._signer is None and body[:1] != SIGNED:
            return self._registry.decode(body)
        inner, signer = self._verified(body, place)
        event = self._registry.decode(inner)
        if signer not in ("", event.role, _reader(place)):
            raise ForgedEventError(
                f"event {event.type} of role {event.role!r:.100} is signed as role {signer!r}"
            )
        return event

    def opened(self, kept: Kept, log: str) -> Kept:
        """An event of a log without its signature.

        Raises:
            ForgedEventError: the signature is missing or wrong; names log and seq.
        """
        seq, body = kept
        if self._signer is None and body[:1] != SIGNED:
            return kept
        try:
            inner, signer = self._verified(body, _in_log(log, seq))
            if signer:
                raise ForgedEventError(f"it is signed as role {signer!r}, which owns no log")
        except ForgedEventError as error:
            raise ForgedEventError(f"log {log!r}, seq {seq}: {error}") from None
        return Kept(seq, inner)

    def decode_opened(
        self, kept: Sequence[Kept], blobs: Mapping[str, bytes], *, log: str, at: str
    ) -> list[Event]:
        """As `Registry.decode_log`."""
        return self._registry.decode_log(kept, blobs, log=log, at=at)

    def _verified(self, body: bytes, place: str) -> tuple[bytes, str]:
        if self._signer is not None:
            return self._signer.verify(body, self._bytes(place))
        if body[:1] == SIGNED:
            raise ForgedEventError("it is signed, and this process has no key: set AWORLD_BUS_KEY")
        return body, ""

    def _bytes(self, place: str) -> bytes:
        return f"{self._namespace}\0{place}\0".encode()


def _in_log(log: str, seq: int) -> str:
    return f"log:{log}:{seq}"


def _reader(place: str) -> str:
    """The role that reads there without a master key."""
    kind, _, name = place.partition(":")
    return (tool_of_queue(name) or "") if kind == "queue" else ""
