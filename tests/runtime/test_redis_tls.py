"""`rediss://`: the server is verified, the client can be, and what is wrong is told at once."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

import pytest

from aworld_runtime.bus import open_bus
from aworld_runtime.bus.server import PrivateServer
from aworld_runtime.errors import BusUnavailableError, ConfigError, ProcessError
from aworld_runtime.processes import free_port
from tests.certificates import Authority, Certificate, tls_options
from tests.services import missing

pytestmark = pytest.mark.anyio


@dataclass(frozen=True)
class TlsServer:
    """A server with a port for TLS and one without."""

    port: int
    plain_port: int
    authority: Authority

    def url(self, **options: object) -> str:
        return f"rediss://127.0.0.1:{self.port}/0?{urlencode(options)}"


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.found(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def other_authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.found(tmp_path_factory.mktemp("others"))


@pytest.fixture
def certificate(authority: Authority) -> Certificate:
    return authority.issue("server")


@pytest.fixture
def client_certificates() -> str:
    return "optional"


@pytest.fixture
async def server(
    tmp_path: Path, authority: Authority, certificate: Certificate, client_certificates: str
) -> AsyncIterator[TlsServer]:
    port = free_port()
    options = tls_options(authority, certificate, port) | {"tls-auth-clients": client_certificates}
    server = PrivateServer(tmp_path, options=options)
    try:
        await server.start()
    except ProcessError as error:
        missing("Redis or Valkey with TLS", str(error))
    async with server:
        yield TlsServer(port, server.port or 0, authority)


async def refusal(url: str, *kinds: type[Exception]) -> str:
    """Why no bus is to be had there; told in seconds."""
    began = time.monotonic()
    with pytest.raises(kinds or ConfigError) as caught:
        async with open_bus(url):
            pass
    assert time.monotonic() - began < 10
    return str(caught.value)


async def test_a_server_of_an_authority_that_is_not_trusted_is_refused(
    server: TlsServer, other_authority: Authority
) -> None:
    for url in (server.url(), server.url(ssl_ca_certs=other_authority.file)):
        assert "not trusted: self-signed certificate in certificate chain" in await refusal(url)


@pytest.mark.parametrize(
    "days, address, fault",
    [(-1, "127.0.0.1", "certificate has expired"), (2, "10.0.0.1", "IP address mismatch")],
    ids=["expired", "of another host"],
)
async def test_a_certificate_that_does_not_count_is_refused(
    tmp_path: Path, authority: Authority, days: int, address: str, fault: str
) -> None:
    certificate, port = authority.issue("wrong", address=address, days=days), free_port()
    options = tls_options(authority, certificate, port)
    try:
        async with PrivateServer(tmp_path, options=options):
            url = f"rediss://127.0.0.1:{port}/0?{urlencode({'ssl_ca_certs': authority.file})}"
            assert fault in await refusal(url)
    except ProcessError as error:
        missing("Redis or Valkey with TLS", str(error))


async def test_a_port_with_tls_and_one_without_are_told_apart(server: TlsServer) -> None:
    plain = server.url(ssl_ca_certs=server.authority.file).replace(
        f":{server.port}/", f":{server.plain_port}/"
    )
    assert "has no TLS there: use redis://" in await refusal(plain)
    assert "speaks TLS there: use rediss://" in await refusal(f"redis://127.0.0.1:{server.port}/0")


@pytest.mark.parametrize("client_certificates", ["yes"])
async def test_a_server_that_asks_for_it_gets_a_certificate_of_the_client(
    server: TlsServer,
) -> None:
    trusted = {"ssl_ca_certs": server.authority.file}
    # The server's word why it ends the connection can be overtaken by the end.
    refused = await refusal(server.url(**trusted), ConfigError, BusUnavailableError)
    assert "ssl_certfile" in refused
    client = server.authority.issue("client")
    url = server.url(**trusted, ssl_certfile=client.file, ssl_keyfile=client.key)
    async with open_bus(url) as bus, bus.consume("q", consumer="c"):
        assert await bus.last_seq("log") == 0


@pytest.mark.parametrize(
    "url, fault",
    [
        ("rediss://h?ssl_ca_certs=/nowhere.crt", "ssl_ca_certs=/nowhere.crt: there is no such"),
        ("rediss://h?ssl_cert_reqs=never", "ssl_cert_reqs=never: use none"),
        ("rediss://h?ssl_cacerts=x", "unknown parameter 'ssl_cacerts'"),
        ("redis://h?ssl_cert_reqs=none", "redis:// has no TLS"),
    ],
)
def test_wrong_options_are_named(url: str, fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_bus(url)
    assert fault in str(caught.value)
