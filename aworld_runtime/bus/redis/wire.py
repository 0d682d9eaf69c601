"""One connection to the server: where it is, how to get there, send bytes, read replies.

redis-py connects, authenticates and speaks TLS; its own reading and retrying are left out. Nothing
here is sent twice, and whoever is cancelled or too late in the middle of an exchange loses the
connection, never the order of replies.
"""

from __future__ import annotations

import asyncio
import math
import re
import socket
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, cast
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit, urlunsplit

import anyio
import hiredis
from redis.asyncio.connection import (
    AbstractConnection,
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
    parse_url,
)
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, AuthorizationError, RedisError, ResponseError

from aworld_runtime.bus.limits import Limits, number
from aworld_runtime.bus.redis import tls
from aworld_runtime.errors import ConfigError
from aworld_runtime.urls import check_user, shown

CONNECT_S = 4.0
"""Seconds for connecting, authenticating and loading the scripts."""
REPLY_S = 5.0
"""Seconds without a reply after which a connection counts as dead."""
OUTAGE_S = 30.0
"""Default of `?outage_s=`: how long a call waits for a server that is away."""
MB = 1024 * 1024
OUTBOX_MB = 64
"""Default of `?outbox_mb=`: how much may wait to be sent."""
READ_BYTES = 256 * 1024
SERVER_OPTIONS = {"db"}
"""Query parameters that redis-py understands and that make sense here, beside `ssl_…`."""
MISSING = object()
_pack_command = cast("Callable[[tuple[bytes | str, ...]], bytes]", hiredis.pack_command)

Argument: TypeAlias = bytes | str
Command: TypeAlias = Sequence[Argument]
ASKING: Command = (b"ASKING",)
Reply: TypeAlias = Any
"""What hiredis makes of a reply: bytes, int, None, a list of replies, or a `ReplyError`."""


class Unreachable(Exception):
    """No connection, or it broke. The outcome of what was sent is unknown."""


class TooLarge(Unreachable):
    """The reply has more bytes than are read; the connection is gone, and the reply with it."""


class ReplyError(Exception):
    """An error reply."""

    @property
    def code(self) -> str:
        """Its first word: OOM, NOSCRIPT, NOGROUP, ..."""
        return str(self).partition(" ")[0]

    @property
    def denied(self) -> bool:
        """Whether the server's access list forbids it."""
        return self.code == "NOPERM" or "The user executing the script can't" in str(self)


@dataclass(frozen=True)
class Address:
    """A bus URL, taken apart."""

    url: str
    """Without the password, for messages."""
    server_url: str
    """As redis-py takes it; of a cluster, the first node's."""
    namespace: str = "aworld"
    outage_s: float = OUTAGE_S
    outbox_bytes: int = OUTBOX_MB * MB
    limits: Limits = field(default_factory=Limits)
    seeds: tuple[str, ...] = ()
    """`host:port` of the nodes that know a cluster; none: a single server."""

    @property
    def user(self) -> str:
        """Who we are at the server."""
        return unquote(urlsplit(self.server_url).username or "default")

    def node(self, place: str) -> Address:
        """Of one node of the cluster, at `host:port`."""
        server_url = at_place(self.server_url, place)
        return replace(self, url=f"{self.url} (node {place})", server_url=server_url, seeds=())

    @classmethod
    def parse(cls, url: str) -> Address:
        """Take our own parameters out of `url`.

        Raises:
            ConfigError: an unknown parameter, or a wrong value.
        """
        parts = urlsplit(url)
        query = dict(parse_qsl(parts.query))
        public = shown(url)
        namespace = query.pop("namespace", "aworld")
        try:
            check_user(url)
            outage_s = number(query, "outage_s", OUTAGE_S)
            outbox_bytes = int(number(query, "outbox_mb", OUTBOX_MB) * MB)
            limits = Limits.taken_from(query)
            for name in query:
                if name not in SERVER_OPTIONS and not name.startswith("ssl_"):
                    raise ConfigError(
                        f"bus {public}: unknown parameter {name!r}; allowed are namespace, outage_s,"
                        " outbox_mb, queue_limit, mail_limit, db and ssl_…"
                    )
            _check_place(parts)
            # Not urlunsplit: it makes unix:/path of unix:///path.
            options = "?" + urlencode(query) if query else ""
            scheme, _, clustered = parts.scheme.partition("+")
            user, at, hosts = parts.netloc.rpartition("@")
            seeds = tuple(map(_place, hosts.split(","))) if clustered else ()
            if seeds and (parts.path.strip("/0") or query.get("db", "0") != "0"):
                raise ValueError("a cluster has database 0 alone")
            server_url = f"{scheme}://{user}{at}{seeds[0] if seeds else hosts}{parts.path}{options}"
            parse_url(server_url)
            tls.check_options(scheme, query)
            return cls(public, server_url, namespace, outage_s, outbox_bytes, limits, seeds)
        except ValueError as error:
            raise ConfigError(f"bus {public}: {error}") from error


class Wire(AbstractConnection):
    """A connected socket and its replies. Made by `dial`."""

    asking = False
    """Whether each command is to say that it was sent here although its slot is still elsewhere."""
    most_bytes: float = math.inf
    """A longer reply is not read: `TooLarge`."""
    _replies: hiredis.Reader

    async def open(self) -> None:
        """Connect and authenticate."""
        await self.connect()
        self._replies = hiredis.Reader(replyError=ReplyError, notEnoughData=MISSING)

    async def exchange(
        self, packed: bytes, replies: int, *, patience_s: float = REPLY_S
    ) -> list[Reply]:
        """Send commands and read so many replies.

        Raises:
            Unreachable: the connection broke, or nothing came for `patience_s`.
        """
        # Aborting by timer needs no cancellation, which a dying connection can swallow.
        timer = asyncio.get_running_loop().call_later(patience_s, self.drop)
        try:
            await self.send(packed)
            found: list[Reply] = []
            while len(found) < replies:
                found.append(await self.receive())
            return found
        except BaseException:
            self.drop()
            raise
        finally:
            timer.cancel()

    async def ask(self, commands: Sequence[Command], *, patience_s: float = REPLY_S) -> list[Reply]:
        """Exchange commands for their replies; raises as `exchange` does."""
        if not self.asking:
            return await self.exchange(pack(commands), len(commands), patience_s=patience_s)
        both = [part for command in commands for part in (ASKING, command)]
        return (await self.exchange(pack(both), len(both), patience_s=patience_s))[1::2]

    async def send(self, packed: bytes) -> None:
        """Send commands; `Unreachable` if the connection is gone."""
        try:
            if self._writer is None:
                raise Unreachable("not connected")
            self._writer.write(packed)
            await self._writer.drain()
        except OSError as error:
            raise Unreachable(str(error) or type(error).__name__) from error

    async def receive(self) -> Reply:
        """The next reply; `Unreachable` if the connection is gone."""
        size = 0
        try:
            while (reply := self._replies.gets()) is MISSING:
                if self._reader is None:
                    raise Unreachable("the connection was closed")
                data = await self._reader.read(READ_BYTES)
                if not data:
                    raise Unreachable("the server closed the connection, or did not answer in time")
                size += len(data)
                if size > self.most_bytes:
                    raise TooLarge(f"a reply of more than {self.most_bytes} bytes is not read")
                self._replies.feed(data)
        except (OSError, hiredis.ProtocolError) as error:
            raise Unreachable(str(error) or type(error).__name__) from error
        return reply

    def drop(self) -> None:
        """Close at once, with a reset: a stalled server then throws away what it has not read yet."""
        if self._writer is None:
            return
        wire = self._writer.get_extra_info("socket")
        if wire is not None and wire.family != socket.AF_UNIX:
            with suppress(OSError):  # the other side was faster
                wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()
        self._parser.on_disconnect()
        self._reader = self._writer = None

    async def close(self) -> None:
        """Close in peace."""
        try:
            with anyio.CancelScope(shield=True), anyio.move_on_after(1.0):
                await self.disconnect()
        except (OSError, RedisError):
            self.drop()


class TcpWire(Wire, Connection):
    """`redis://`."""


class TlsWire(Wire, SSLConnection):
    """`rediss://`."""


class UnixWire(Wire, UnixDomainSocketConnection):
    """`unix://`."""


WIRES: Mapping[type[AbstractConnection], type[Wire]] = {
    Connection: TcpWire,
    SSLConnection: TlsWire,
    UnixDomainSocketConnection: UnixWire,
}


async def dial(
    address: Address, prologue: Sequence[Command] = (), *, patience_s: float = CONNECT_S
) -> tuple[Wire, list[Reply]]:
    """A connection, and the replies to `prologue`, sent first.

    Raises:
        Unreachable: not within `patience_s`, or the server isn't ready.
        ConfigError: it doesn't know user or password, or isn't trusted.
    """
    options = cast("dict[str, Any]", parse_url(address.server_url))
    make = WIRES[options.pop("connection_class", Connection)]
    wire = make(
        **options,
        protocol=2,
        retry=Retry(NoBackoff(), 0),
        socket_timeout=None,
        socket_connect_timeout=patience_s,
        driver_info=None,
    )
    if isinstance(wire, TlsWire):
        wire.ssl_context = tls.shared_context(address.server_url)
    replies: list[Reply] = []
    try:
        with anyio.fail_after(patience_s):
            await wire.open()
            if prologue:
                replies = await wire.exchange(pack(prologue), len(prologue))
    except (AuthenticationError, AuthorizationError) as error:
        wire.drop()
        what = str(error).rstrip(".")
        raise ConfigError(f"bus {address.url}: {what}: check user and password") from error
    except (RedisError, OSError, Unreachable) as error:
        wire.drop()
        if wrong := tls.fault(error):
            raise ConfigError(f"bus {address.url}: {wrong}") from error
        if isinstance(error, ResponseError) and "DB index" in str(error):
            raise ConfigError(
                f"bus {address.url}: the server has no such database ({error})"
            ) from error
        message = str(error) or f"no answer within {patience_s:.1f} s"
        if isinstance(wire, TlsWire) and "ssl_certfile" not in options and tls.cut(error):
            message += (
                "; if it wants a client's certificate, name one with ssl_certfile, ssl_keyfile"
            )
        raise Unreachable(message.rstrip(".")) from error
    except BaseException:
        wire.drop()
        raise
    for reply in replies:
        if isinstance(reply, ReplyError):
            wire.drop()
            raise _refusal(address, reply)
    return wire, replies


def _refusal(address: Address, reply: ReplyError) -> ConfigError | Unreachable:
    """What a server that answers a new connection so is to its caller."""
    if reply.denied:
        return ConfigError(denial(address, reply))
    if reply.code == "NOAUTH":
        return ConfigError(
            f"bus {address.url}: the server wants a password: redis://USER:PASSWORD@HOST:PORT"
        )
    return Unreachable(str(reply))


def denial(address: Address, reply: ReplyError, command: str = "") -> str:
    """What to tell whoever is not allowed to do that."""
    what = f" {command}" if command else ""
    return (
        f"bus {address.url}: user {address.user!r} may not do this{what}: {reply}. Use the user of the role that it"
        " is for, or give this one the role's rights: aworld acl"
    )


def at_place(server_url: str, place: str) -> str:
    """The same for another server, at `host:port`."""
    parts = urlsplit(server_url)
    user, at, _ = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{user}{at}{place}"))


def _check_place(parts: SplitResult) -> None:
    """Refuse what redis-py would take for its own default: no host, a database that is no number."""
    if parts.scheme == "unix":
        return
    for place in parts.netloc.rpartition("@")[2].split(","):
        if not re.fullmatch(r"(\[.+\]|[^:]+)(:\d+)?", place):
            raise ValueError(f"server {place!r}: expected {parts.scheme}://HOST:PORT")
    if not re.fullmatch(r"/?\d*", parts.path):
        raise ValueError(f"database {parts.path[1:]!r}: expected a number")


def _place(host: str) -> str:
    """`host:port`, the port being 6379 where none is given."""
    return host if re.search(r":\d+$", host) else f"{host}:6379"


def pack(commands: Iterable[Command]) -> bytes:
    """Commands as they go over the wire."""
    return b"".join([_pack_command(tuple(command)) for command in commands])
