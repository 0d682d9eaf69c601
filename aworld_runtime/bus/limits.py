"""What every bus refuses: work for a full queue, mail for a full mailbox, a broadcast that is too large.

Queues and mailboxes have a high watermark. What comes beyond is refused until some of it is settled; what is there
already is not: retries, takeovers and requeued dead letters pass.
"""

from __future__ import annotations

import json
import math
from collections.abc import MutableMapping
from dataclasses import dataclass

from pydantic import JsonValue

from aworld_runtime import telemetry
from aworld_runtime.errors import PayloadTooLargeError, QueueFullError
from aworld_runtime.events import REFUSE_ABOVE

QUEUE_LIMIT = 100_000
MAIL_LIMIT = 10_000


@dataclass(frozen=True, slots=True)
class Limits:
    """One limit for every queue of a bus, and one for every mailbox."""

    queue: int = QUEUE_LIMIT
    """`?queue_limit=`: unsettled events of a queue, those that wait for their time included."""
    mail: int = MAIL_LIMIT
    """`?mail_limit=`: unacknowledged mail of a log."""

    def __post_init__(self) -> None:
        for option, limit in (("queue_limit", self.queue), ("mail_limit", self.mail)):
            if limit < 1:
                raise ValueError(f"{option}={limit} must be at least 1")

    @classmethod
    def taken_from(cls, query: MutableMapping[str, str]) -> Limits:
        """The limits among a bus URL's parameters, which are taken out.

        Raises:
            ValueError: one that is no number, or below 1.
        """
        return cls(
            int(number(query, "queue_limit", QUEUE_LIMIT)),
            int(number(query, "mail_limit", MAIL_LIMIT)),
        )

    def check_queue(self, name: str, length: int) -> None:
        """Refuse work for a queue that holds `length` events."""
        if length >= self.queue:
            telemetry.REFUSED.add()
            raise QueueFullError(
                f"queue {name!r} is full: {length} events are unsettled, and queue_limit={self.queue}. Send it again"
                " later, add consumers, or raise ?queue_limit= in the bus URL"
            )

    def check_mail(self, log: str, length: int) -> None:
        """Refuse mail for a log that has `length` unacknowledged ones."""
        if length >= self.mail:
            telemetry.REFUSED.add()
            raise QueueFullError(
                f"the mailbox of log {log!r} is full: {length} mails wait for its owner, and mail_limit={self.mail}."
                " Send it again later, see whether the owner is alive, or raise ?mail_limit= in the bus URL"
            )


def number(query: MutableMapping[str, str], name: str, default: float) -> float:
    """A parameter of a bus's URL, which is taken out of its `query`.

    Raises:
        ValueError: it is no number.
    """
    given = query.pop(name, default)
    try:
        value = float(given)
    except ValueError:
        raise ValueError(f"{name}={given}: expected a number") from None
    if not math.isfinite(value):
        raise ValueError(f"{name}={given}: expected a number")
    return value


def broadcast_body(channel: str, value: JsonValue) -> str:
    """A broadcast as JSON.

    Raises:
        PayloadTooLargeError: as large as no event may be.
    """
    body = json.dumps(value)
    if len(body) > REFUSE_ABOVE:
        raise PayloadTooLargeError(
            f"a broadcast on {channel!r} has {len(body)} bytes; at most {REFUSE_ABOVE} are sent: store the content"
            " elsewhere and broadcast a reference"
        )
    return body
