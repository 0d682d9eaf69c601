"""Patience that doesn't run out while its process stands still."""

import time

import pytest

from aworld_runtime.bus.redis.awake import LONGEST_TRY_S, Awake


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The machine's clock, to be set."""
    seconds = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: seconds[0])
    return seconds


def test_time_goes_on_as_on_the_machine_while_attempts_are_made(machine: list[float]) -> None:
    awake = Awake()
    began = awake.now()
    for _ in range(10):
        machine[0] += 4.5
        awake.now()
    assert awake.now() - began == 45.0


def test_an_hour_in_which_the_process_was_stopped_is_no_more_than_one_attempt(
    machine: list[float],
) -> None:
    awake = Awake()
    began = awake.now()
    machine[0] += 3600
    assert awake.now() - began == LONGEST_TRY_S
