"""Waiting for something to become true, instead of sleeping."""

import time
from collections.abc import Awaitable, Callable
from inspect import isawaitable

import anyio

INTERVAL = 0.01


async def wait_until(
    predicate: Callable[[], bool | Awaitable[bool]],
    timeout: float = 5.0,
    description: str = "the condition",
) -> None:
    """Return once `predicate` holds; fail with `description` after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        answer = predicate()
        if await answer if isawaitable(answer) else answer:
            return
        if time.monotonic() > deadline:
            raise AssertionError(f"{description} did not come true within {timeout} s")
        await anyio.sleep(INTERVAL)


def wait_until_sync(
    predicate: Callable[[], bool], timeout: float = 5.0, description: str = "the condition"
) -> None:
    """The same for tests that run no event loop."""
    deadline = time.monotonic() + timeout
    while not predicate():
        if time.monotonic() > deadline:
            raise AssertionError(f"{description} did not come true within {timeout} s")
        time.sleep(INTERVAL)
