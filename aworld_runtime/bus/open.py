"""Choose a bus by its URL."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from aworld_runtime.bus.base import Bus
from aworld_runtime.errors import ConfigError
from aworld_runtime.events import Registry
from aworld_runtime.signatures import Signer
from aworld_runtime.urls import shown

SCHEMES = ("memory", "redis", "rediss", "unix", "redis+cluster", "rediss+cluster")


def open_bus(url: str, registry: Registry | None = None, *, keys: Sequence[str] = ()) -> Bus:
    """The bus at `url`, to be entered with `async with`. Connects on entry.

    With `keys` (`Settings.bus_keys`) events are signed, and only signed ones are read; `memory://` needs none.

    Raises:
        ConfigError: a scheme that isn't known, the extra it needs isn't installed, or a key that is none.
    """
    scheme = urlsplit(url).scheme
    registry = registry or Registry()
    match scheme:
        case "memory":
            from aworld_runtime.bus.memory import MemoryBus

            return MemoryBus(url, registry)
        case "redis" | "rediss" | "unix" | "redis+cluster" | "rediss+cluster":
            try:
                from aworld_runtime.bus.redis import RedisBus
            except ImportError as error:
                raise ConfigError(
                    f"bus {shown(url)!r} needs the extra 'redis': pip install 'aworld-rt[redis]'"
                ) from error
            return RedisBus(url, registry, Signer(keys) if keys else None)
        case _:
            raise ConfigError(
                f"bus={shown(url)!r}: unknown scheme {scheme!r}; expected a URL such as "
                f"redis://HOST:PORT, with one of {', '.join(SCHEMES)}"
            )
