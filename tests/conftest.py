"""What every test may use."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """redis-py and PyMongo's asynchronous clients are for asyncio alone."""
    return "asyncio"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the `gpu` tests where no GPU is."""
    no_gpu = pytest.mark.skip(reason="needs a GPU")
    has_gpu = Path("/dev/nvidiactl").exists()
    for item in items:
        if item.get_closest_marker("gpu") and not has_gpu:
            item.add_marker(no_gpu)
