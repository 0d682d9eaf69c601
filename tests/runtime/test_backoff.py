"""Waits between tries: they grow, they have a bound, and no two are alike."""

import random

import pytest

from aworld_runtime.bus.backoff import backoff_s


@pytest.mark.parametrize("failures, bound", [(1, 0.5), (2, 1.0), (5, 8.0), (9, 60.0), (5000, 60.0)])
def test_a_wait_is_anything_up_to_a_bound_that_doubles_with_each_failure(
    failures: int, bound: float
) -> None:
    chance = random.Random(1)
    waits = [backoff_s(failures, chance=chance) for _ in range(1000)]
    assert 0 <= min(waits) < 0.05 * bound
    assert 0.95 * bound < max(waits) <= bound


def test_the_same_chance_gives_the_same_waits() -> None:
    one, other = ([backoff_s(n, chance=random.Random(n)) for n in range(9)] for _ in range(2))
    assert one == other
