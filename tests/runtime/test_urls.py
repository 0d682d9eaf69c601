"""What of a URL may be shown."""

import pytest

from aworld_runtime.bus import open_bus
from aworld_runtime.errors import ConfigError
from aworld_runtime.store import open_store
from aworld_runtime.urls import shown


@pytest.mark.parametrize(
    "url, expected",
    [
        ("redis://:p@host/0?db=1", "redis://:***@host/0?db=1"),
        ("rediss://me:a@b@host:6379/0", "rediss://me:***@host:6379/0"),
        ("mongodb://a:b%40c@h1:1,h2/db?w=1", "mongodb://a:***@h1:1,h2/db?w=1"),
        ("mongodb://h/db?tlsCertificateKeyFilePassword=s&w=1",
         "mongodb://h/db?tlsCertificateKeyFilePassword=***&w=1"),
        ("redis://me:a/b?c#d@host/0", "redis://me:***@host/0"),
        ("bus=redis://me:p@host", "bus=redis://me:***@host"),
    ],
)  # fmt: skip
def test_a_password_is_hidden(url: str, expected: str) -> None:
    assert shown(url) == expected


@pytest.mark.parametrize(
    "url",
    ["redis://me@host:6379/0", "mongodb://h1:1,h2:2/db", "unix:///tmp/socket", "sqlite:///a/b.db"],
)
def test_a_url_without_one_stays_as_it_is(url: str) -> None:
    assert shown(url) == url


@pytest.mark.parametrize("url", ["oracle://me:secret@host", "redis://h?password=secret"])
def test_an_error_about_a_url_hides_it_too(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_bus(url)
    assert "secret" not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        open_store(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("password", ["sec/ret", "sec?ret", "sec#ret", "1/sec"])
@pytest.mark.parametrize("user", ["me", ""])
async def test_a_password_that_is_not_encoded_is_said_so_without_it(
    user: str, password: str
) -> None:
    expected = r"redis://\w*:\*\*\*@host/0: in user and password write %2F for '/'"
    with pytest.raises(ConfigError, match=expected) as caught:
        open_bus(f"redis://{user}:{password}@host/0")
    assert "sec" not in str(caught.value)
    with pytest.raises(ConfigError, match="write %2F") as caught:
        async with open_store(f"mongodb://{user}:{password}@host/db"):
            pass
    assert "sec" not in str(caught.value)


async def test_a_bus_shows_its_url_without_it() -> None:
    assert open_bus("redis://me:secret@host/0").url == "redis://me:***@host/0"
