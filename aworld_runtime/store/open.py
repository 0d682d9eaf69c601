"""Choose a store by its URL."""

from __future__ import annotations

from urllib.parse import urlsplit

from aworld_runtime.errors import ConfigError
from aworld_runtime.events import Registry
from aworld_runtime.store.base import Store
from aworld_runtime.urls import shown

SCHEMES = ("sqlite", "mongodb", "mongodb+srv")


def open_store(url: str, registry: Registry | None = None) -> Store:
    """The store at `url`, to be entered with `async with`. Connects on entry.

    Raises:
        ConfigError: a scheme that isn't known, or the extra it needs isn't installed.
    """
    scheme = urlsplit(url).scheme
    registry = registry or Registry()
    match scheme:
        case "sqlite":
            from aworld_runtime.store.sqlite import SQLiteStore

            return SQLiteStore(url, registry)
        case "mongodb" | "mongodb+srv":
            try:
                from aworld_runtime.store.mongo import MongoStore
            except ImportError as error:
                raise ConfigError(
                    f"store {shown(url)!r} needs the extra 'mongo': pip install 'aworld-rt[mongo]'"
                ) from error
            return MongoStore(url, registry)
        case _:
            raise ConfigError(
                f"store={shown(url)!r}: unknown scheme {scheme!r}; expected a URL such as "
                f"sqlite:///FILE or mongodb://HOST/DATABASE, with one of {', '.join(SCHEMES)}"
            )
