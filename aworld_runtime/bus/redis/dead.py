"""Dead letters: what queues gave up on, and mail that could not be read."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from aworld_runtime.bus.base import DEAD_MAIL, DeadLetter
from aworld_runtime.bus.redis.codec import Codec, letter
from aworld_runtime.bus.redis.entries import BODY, DELIVERIES, LOG, REASON, Entry, entries, position
from aworld_runtime.bus.redis.keys import Keys
from aworld_runtime.bus.redis.link import Link
from aworld_runtime.bus.redis.scripts import logs, queues
from aworld_runtime.errors import EventError, NotFoundError

NO_LIMIT = 2**53
"""The mail was there before."""


class DeadLetters:
    """Those of one bus."""

    def __init__(self, link: Link, keys: Keys, codec: Codec) -> None:
        self._link = link
        self._keys = keys
        self._codec = codec

    async def queues(self) -> list[str]:
        """Queues that have some, by the set of those that ever had."""
        names = sorted(await self._link.call(b"SMEMBERS", self._keys.dead_queues))
        lengths = [self._link.call(b"XLEN", self._keys.queue(n.decode()).dead) for n in names]
        return [name.decode() for name, length in zip(names, lengths, strict=True) if await length]

    async def of(self, queue: str, limit: int) -> list[DeadLetter]:
        key = self._keys.queue(queue).dead
        reply = await self._link.call(b"XRANGE", key, b"-", b"+", b"COUNT", str(limit))
        return [self._letter(queue, entry) for entry in entries(reply)]

    async def requeue(self, queue: str, letter_id: str) -> None:
        """Back to the queue, as a whole; mail to its log, in two steps, as they may stand on two nodes."""
        keys = self._keys.queue(queue)
        found = await self._find(queue, letter_id)
        log = found.get(LOG)
        if log is None:
            if not await queues.requeue(self._link, keys, letter_id):
                raise _unknown(queue, letter_id)
            return
        log_keys = self._keys.log(log.decode())
        await logs.send_mail(self._link, log_keys, [found[BODY]], (), NO_LIMIT)
        await self._link.call(b"XDEL", keys.dead, letter_id)

    async def drop(self, queue: str, letter_id: str) -> None:
        await self._find(queue, letter_id)
        await self._link.call(b"XDEL", self._keys.queue(queue).dead, letter_id)

    async def bury_mail(self, log: str, stream: bytes, entry: Entry, reason: str) -> None:
        """Move mail here: in two steps, as they may stand on two nodes."""
        entry_id, fields = entry
        facts = (BODY, fields[1], REASON, reason, DELIVERIES, b"1", LOG, log)
        await self._link.call(b"SADD", self._keys.dead_queues, DEAD_MAIL)
        await self._link.call(b"XADD", self._keys.queue(DEAD_MAIL).dead, b"*", *facts)
        await self._link.call(b"XDEL", stream, entry_id)

    async def _find(self, queue: str, letter_id: str) -> dict[bytes, bytes]:
        if not re.fullmatch(r"\d+-\d+", letter_id):  # what is no id is an error to the server
            raise _unknown(queue, letter_id)
        key = self._keys.queue(queue).dead
        found = entries(await self._link.call(b"XRANGE", key, letter_id, letter_id))
        if not found:
            raise _unknown(queue, letter_id)
        fields = found[0][1]
        return dict(zip(fields[::2], fields[1::2], strict=True))

    def _letter(self, queue: str, entry: Entry) -> DeadLetter:
        entry_id, fields = entry
        values = dict(zip(fields[::2], fields[1::2], strict=True))
        raw, log = values[BODY], values.get(LOG)
        try:
            event = self._codec.decode(raw, letter(queue, log.decode() if log else None))
        except EventError:
            event = None
        return DeadLetter(
            id=entry_id.decode(),
            queue=queue,
            event=event,
            reason=values[REASON].decode(errors="replace"),
            deliveries=int(values[DELIVERIES]),
            time=datetime.fromtimestamp(position(entry_id)[0] / 1000, UTC),
            raw=raw,
            log=None if log is None else log.decode(),
        )


def _unknown(queue: str, letter_id: str) -> NotFoundError:
    return NotFoundError(f"queue {queue!r} has no dead letter {letter_id!r}")
