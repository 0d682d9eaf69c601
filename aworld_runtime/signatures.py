"""Signatures: only who has a key can write an event that others accept, and only where it was meant to stand.

    body     h | length of the signer's name | signer | HMAC-SHA256 over the place and what follows | the event

A master key, which trusted nodes have, signs as nobody in particular and verifies everybody. A role's key is derived from
it: who has no more, as a tool worker does, can sign as this role alone, and reads what was signed for it. With several
keys the first signs and all verify, so that keys can be changed while events are under way.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from functools import lru_cache

from aworld_runtime.errors import ConfigError, ForgedEventError

SIGNED = b"h"
"""First byte of a signed body."""
ROLE_KEY = "role:"
SHORTEST_KEY = 16
_MAC_BYTES = 32
_PADDED = 64
"""Bytes that SHA-256 takes at a time."""


def role_key(master: str, role: str) -> str:
    """What to give to a node that may sign as this role alone."""
    return f"{ROLE_KEY}{role}:{_derived(_digest(master), role).hex()}"


class Signer:
    """Signs and verifies bodies with the keys that this process has.

    Raises:
        ConfigError: a key that is too short, or no role's.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._masters: list[bytes] = []
        self._roles: dict[str, list[_Mac]] = {}
        for key in keys:
            if key.startswith(ROLE_KEY):
                role, secret = _role_and_secret(key)
                self._roles.setdefault(role, []).append(_Mac(secret))
            elif len(key) >= SHORTEST_KEY:
                self._masters.append(_digest(key))
            else:
                raise ConfigError(
                    f"a bus key (AWORLD_BUS_KEY) has {len(key)} characters: use {SHORTEST_KEY} or more, at random"
                )
        # Of names that anybody may write: only so many are kept.
        self._macs = lru_cache(maxsize=256)(self._find_macs)

    def sign(self, body: bytes, place: bytes, *, role: str, reader: str = "") -> bytes:
        """`body` as it may stand at `place`. Signed for `reader`, a role that has no master key, or as `role`.

        Raises:
            ForgedEventError: this process has no key to sign as `role`.
        """
        signer = reader if self._masters else role
        macs = self._macs(signer)
        if not macs:
            raise ForgedEventError(
                f"no key to sign as role {role!r}: this process may sign as {', '.join(self._roles)} alone"
            )
        name = signer.encode()
        return b"%b%c%b%b%b" % (SIGNED, len(name), name, macs[0].of(place, body), body)

    def verify(self, body: bytes, place: bytes) -> tuple[bytes, str]:
        """The event's own bytes, and the role whose key signed it: "" for a master key.

        Raises:
            ForgedEventError: it isn't signed, or not with one of these keys, or for another place.
        """
        if body[:1] != SIGNED:
            raise ForgedEventError("it is not signed, and AWORLD_BUS_KEY asks for it")
        begin = 2 + body[1] if len(body) > 1 else 0
        name, mac, inner = (
            body[2:begin],
            body[begin : begin + _MAC_BYTES],
            body[begin + _MAC_BYTES :],
        )
        signer = name.decode(errors="replace")
        for known in self._macs(signer):
            if hmac.compare_digest(known.of(place, inner), mac):
                return inner, signer
        raise ForgedEventError(
            f"its signature{signer and f' as role {signer!r:.100}'} is wrong, made with an unknown key, or for another place"
        )

    def _find_macs(self, role: str) -> Sequence[_Mac]:
        derived = [_Mac(_derived(master, role)) for master in self._masters]
        return [*derived, *self._roles.get(role, ())]


class _Mac:
    """HMAC-SHA256 with a key that is prepared once: half the time of `hmac.digest`."""

    def __init__(self, key: bytes) -> None:
        padded = key.ljust(_PADDED, b"\0")
        self._inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in padded))
        self._outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in padded))

    def of(self, place: bytes, body: bytes) -> bytes:
        inner = self._inner.copy()
        inner.update(place)
        inner.update(body)
        outer = self._outer.copy()
        outer.update(inner.digest())
        return outer.digest()


def _digest(master: str) -> bytes:
    return hashlib.sha256(master.encode()).digest()


def _derived(master: bytes, role: str) -> bytes:
    return hmac.digest(master, b"aworld-rt role\0" + role.encode(), "sha256")


def _role_and_secret(key: str) -> tuple[str, bytes]:
    role, _, secret = key.removeprefix(ROLE_KEY).rpartition(":")
    try:
        found = bytes.fromhex(secret)
    except ValueError:
        found = b""
    if not role or len(role.encode()) > 255 or len(found) != _MAC_BYTES:
        raise ConfigError("a role's bus key must be role:NAME:KEY, as `aworld acl` prints it")
    return role, found
