"""Every key on the server. Each has an owner, or a TTL (set by the script that makes it).

    log, mail, control, blobs     the episode or run; `unlink` leaves of them a log's last event, with a TTL.
                  Mail and blobs for a log that isn't there (any more) have a TTL
    feed          the namespace; trimmed behind its readers
    feed:id       the namespace; goes only where all else goes too
    work, delayed, dead     the queue
    dead (without a queue)  the namespace; names of the queues that ever had dead letters
    reply, nodes  TTL
    staging       TTL; becomes a log

Keys that one script touches share a hash tag, so that they stand on one node of a cluster.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from typing import NamedTuple

from aworld_runtime.errors import ConfigError

GROUP = b"g"
"""The one consumer group of a queue. Its name says nothing: the key names namespace and role."""


class LogKeys(NamedTuple):
    """What one append touches. Log, mail and control are also the channels on which hints about them go out."""

    log: bytes
    mail: bytes
    control: bytes
    """Stream of mail that passes the other."""
    feed: bytes
    blobs: bytes
    """Hash of the log's large content, by sha256."""
    feed_id: bytes
    """Which feed that is: another, or none, where the server has lost its data."""


class QueueKeys(NamedTuple):
    """What one queue is made of."""

    work: bytes
    """Stream of what is to be done and what is being done."""
    delayed: bytes
    """Sorted set of what is due later."""
    dead: bytes
    """Stream of what was given up on."""


@dataclass(frozen=True)
class Keys:
    """The keys of one namespace."""

    namespace: str
    shards: int = 1
    """Hash tags that logs are spread over."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.-]+", self.namespace):
            raise ConfigError(
                f"bus namespace={self.namespace!r}: use letters, digits, '.', '_' and '-' only"
            )

    def log(self, name: str) -> LogKeys:
        shard = self._shard(name)
        return LogKeys(
            f"{shard}:log:{name}".encode(),
            f"{shard}:mail:{name}".encode(),
            f"{shard}:control:{name}".encode(),
            f"{shard}:feed".encode(),
            f"{shard}:blobs:{name}".encode(),
            f"{shard}:feed:id".encode(),
        )

    def staging(self, name: str, unique: str) -> bytes:
        """Where a log is put together before it appears."""
        return f"{self._shard(name)}:staging:{name}:{unique}".encode()

    @property
    def feeds(self) -> list[bytes]:
        """The feed of each shard."""
        return [f"{self.namespace}:{{{shard}}}:feed".encode() for shard in range(self.shards)]

    @property
    def logs(self) -> bytes:
        """Pattern of the channels on which all logs' hints go out."""
        return f"{self.namespace}:{{*}}:log:*".encode()

    @property
    def feed_id(self) -> bytes:
        """Which feed this is, beside the first."""
        return self.feeds[0] + b":id"

    def queue(self, name: str) -> QueueKeys:
        tag = f"{self.namespace}:{{q:{name}}}"
        return QueueKeys(f"{tag}:work".encode(), f"{tag}:delayed".encode(), f"{tag}:dead".encode())

    @property
    def dead_queues(self) -> bytes:
        """Set of the queues that ever had dead letters."""
        return f"{self.namespace}:dead".encode()

    def reply(self, request_id: str) -> bytes:
        """Also the channel of its hint."""
        return f"{self.namespace}:reply:{request_id}".encode()

    @property
    def nodes(self) -> bytes:
        return f"{self.namespace}:nodes".encode()

    def broadcast(self, channel: str) -> bytes:
        """A channel, not a key."""
        return f"{self.namespace}:broadcast:{channel}".encode()

    def shard_of(self, key: bytes) -> int:
        """Of a log's key."""
        return int(key[len(self.namespace) + 2 : key.index(b"}")])

    def _shard(self, log: str) -> str:
        return f"{self.namespace}:{{{zlib.crc32(log.encode()) % self.shards}}}"


class Patterns(Keys):
    """Of keys, as access rules have them: `*` is every log, queue, request or channel, of every shard."""

    def _shard(self, log: str) -> str:  # noqa: ARG002 - whichever it is in
        return f"{self.namespace}:{{[0-9]*}}"

    @property
    def feeds(self) -> list[bytes]:
        return [self.log("*").feed]
