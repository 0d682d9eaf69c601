"""What every test may use."""

import signal
from pathlib import Path

import pytest
from hypothesis import Phase, settings

settings.register_profile("soak", max_examples=100_000, deadline=None, print_blob=True)
"""For hours: `--hypothesis-profile=soak --timeout=0`."""
settings.register_profile("mutants", phases=[Phase.generate])
"""Whether there is a failure, not the smallest one."""


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """redis-py and PyMongo's asynchronous clients are for asyncio alone."""
    return "asyncio"


def pytest_configure() -> None:
    """A shell's background job ignores Ctrl-C, and so would the processes that tests start and interrupt."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the `gpu` tests where no GPU is; keep apart what would be too much at once.

    Where two processes run the tests (`-n 2 --dist loadgroup`), one at a time of each group runs.
    """
    no_gpu = pytest.mark.skip(reason="needs a GPU")
    has_gpu = Path("/dev/nvidiactl").exists()
    for item in items:
        if item.get_closest_marker("gpu") and not has_gpu:
            item.add_marker(no_gpu)
        if item.get_closest_marker("vllm") or item.path.name == "test_sampler.py":
            item.add_marker(pytest.mark.xdist_group("samplers"))
        elif "e2e" in item.path.parts:
            item.add_marker(pytest.mark.xdist_group("runs"))
