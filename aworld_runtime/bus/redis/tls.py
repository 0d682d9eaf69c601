"""What `rediss://` adds: options that are checked before anything is tried, and errors that say what is wrong.

The server is verified, its name included, unless the URL says otherwise; with `ssl_certfile` and
`ssl_keyfile` it can verify the client, too.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import anyio
from redis.asyncio.connection import RedisSSLContext, SSLConnection, parse_url

FILES = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")
OPTIONS = frozenset({
    *FILES, "ssl_ca_data", "ssl_cert_reqs", "ssl_check_hostname", "ssl_ciphers", "ssl_password"
})  # fmt: skip
PROBE_S = 0.5


def check_options(scheme: str, options: Mapping[str, str]) -> None:
    """See whether a URL's `ssl_…` parameters make sense.

    Raises:
        ValueError: one doesn't; says which.
    """
    for name, value in options.items():
        if not name.startswith("ssl_"):
            continue
        if scheme != "rediss":
            raise ValueError(f"{name} is for rediss:// alone; {scheme}:// has no TLS")
        if name not in OPTIONS:
            raise ValueError(
                f"unknown parameter {name!r}; allowed are {', '.join(sorted(OPTIONS))}"
            )
        if name in FILES and not os.access(value, os.R_OK):
            raise ValueError(f"{name}={value}: there is no such file, or it can't be read")
        if name == "ssl_cert_reqs" and value not in ("none", "optional", "required"):
            raise ValueError(f"ssl_cert_reqs={value}: use none, optional or required")


def shared_context(server_url: str) -> RedisSSLContext:
    """What connections to this server verify with. Made again where a file has changed: making it takes longer
    than connecting.
    """
    options = cast("dict[str, Any]", parse_url(server_url))
    files = [str(options[name]) for name in FILES if name in options]
    with suppress(OSError):  # then opening it says so
        return _context(server_url, tuple(Path(file).stat().st_mtime_ns for file in files))
    return _context(server_url, ())


@lru_cache(maxsize=8)
def _context(server_url: str, _changed: tuple[int, ...]) -> RedisSSLContext:
    options = cast("dict[str, Any]", parse_url(server_url))
    options.pop("connection_class", None)
    return SSLConnection(**options).ssl_context


def fault(error: BaseException) -> str | None:
    """What is wrong with certificates or keys; None where the connection merely broke."""
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return (
                f"the server's certificate is not trusted: {cause.verify_message.rstrip('.')}."
                " Name the authority that issued it with ssl_ca_certs=FILE, and the host as the"
                " certificate does"
            )
        if isinstance(cause, ssl.SSLError) and not isinstance(
            cause, ssl.SSLEOFError | ssl.SSLZeroReturnError
        ):
            return (
                f"TLS failed: {cause.reason or cause}. See whether ssl_certfile and ssl_keyfile belong"
                " together, and whether the server wants a client's certificate"
            )
    return None


def cut(error: BaseException) -> bool:
    """Whether the server ended the connection, as it does where it misses a client's certificate."""
    return any(isinstance(cause, ConnectionError | ssl.SSLEOFError) for cause in _causes(error))


async def mismatch(server_url: str) -> str | None:
    """Whether the server speaks TLS where the URL doesn't, or the other way round. Asks it, without any secret."""
    options = cast("dict[str, Any]", parse_url(server_url))
    host, port = options.get("host", "localhost"), options.get("port", 6379)
    tls = options.get("connection_class") is SSLConnection
    if "path" in options:
        return None
    broken = (OSError, anyio.EndOfStream, anyio.BrokenResourceError)
    with suppress(*broken), anyio.move_on_after(PROBE_S):
        if tls:
            async with await anyio.connect_tcp(host, port) as stream:
                await stream.send(b"PING\r\n")
                if (await stream.receive())[:1] in (b"+", b"-"):
                    return "the server has no TLS there: use redis://, or its port for TLS"
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # only to see what it is
        async with await anyio.connect_tcp(
            host, port, tls=True, ssl_context=context, tls_standard_compatible=False
        ):
            return "the server speaks TLS there: use rediss://"
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
