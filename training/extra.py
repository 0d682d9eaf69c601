"""The extra that training needs."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from aworld_runtime.errors import ConfigError


@contextmanager
def importing_train_extra() -> Generator[None]:
    """Around imports of what needs it.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as missing:
        raise ConfigError(
            f"training needs the extra 'train' ({missing.name} is missing): pip install 'aworld-rt[train]'"
        ) from missing
