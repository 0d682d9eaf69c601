import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aworld_runtime.errors import TrainingError
from aworld_runtime.training.advantages import (
    ADVANTAGES,
    dr_grpo_advantages,
    grpo_advantages,
    is_zero_variance,
    rloo_advantages,
    row_advantages,
)
from aworld_runtime.training.algorithms import AdvantageName
from aworld_runtime.training.rows import TrainingRow

REWARDS = st.lists(st.floats(-10, 10), min_size=1, max_size=16)


def row(rollout: str, reward: float, **changes: Any) -> TrainingRow:
    fields: dict[str, Any] = {
        "rollout_id": rollout,
        "group_id": "group",
        "role": "solver",
        "token_ids": (1, 2),
        "loss_mask": (False, True),
        "behavior_logprobs": (math.nan, -1.0),
        "policy": "policy",
        "policy_version": 0,
        "reward": reward,
    }
    return TrainingRow(**(fields | changes))


def test_hand_computed_group() -> None:
    std = math.sqrt(((2 / 3) ** 2 + 2 * (1 / 3) ** 2) / 2)
    assert grpo_advantages([1.0, 0.0, 0.0]) == pytest.approx(
        [(2 / 3) / (std + 1e-6), (-1 / 3) / (std + 1e-6), (-1 / 3) / (std + 1e-6)], abs=1e-12
    )
    assert dr_grpo_advantages([1.0, 0.0, 0.0]) == pytest.approx([2 / 3, -1 / 3, -1 / 3], abs=1e-12)
    assert rloo_advantages([1.0, 0.0, 0.0]) == pytest.approx([1.0, -0.5, -0.5], abs=1e-12)


@pytest.mark.parametrize("name", ADVANTAGES)
@given(rewards=REWARDS)
def test_advantages_of_a_group_sum_to_zero(name: AdvantageName, rewards: list[float]) -> None:
    assert math.fsum(ADVANTAGES[name](rewards)) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("reward", [1e308, -1e308])
def test_a_reward_too_large_to_be_trained_on_is_named_with_its_group(reward: float) -> None:
    rows = [row("a", reward), row("b", reward), row("c", -reward)]
    with pytest.raises(TrainingError, match=r"group 'group': rollout 'a' has reward .*1e\+30"):
        row_advantages(rows)


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("reward", [1.0, 1e30])
def test_the_largest_rewards_give_advantages_that_float32_holds(
    name: AdvantageName, reward: float
) -> None:
    first, _ = ADVANTAGES[name]([reward, -reward])
    assert 0 < first < 1e31


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("rewards", [[0.7], [0.1, 0.1, 0.1], [0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1]])
def test_a_group_without_variance_gives_exactly_zero(
    name: AdvantageName, rewards: list[float]
) -> None:
    assert is_zero_variance(rewards)
    assert ADVANTAGES[name](rewards) == (0.0,) * len(rewards)


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_an_error(reward: float) -> None:
    with pytest.raises(TrainingError, match="not all finite"):
        grpo_advantages([1.0, reward])


def test_a_split_rollout_counts_once() -> None:
    rows = [row("a", 1.0, weight=1 / 3)] * 3 + [row("b", 0.0)]
    assert row_advantages(rows, advantage=dr_grpo_advantages).values == (0.5, 0.5, 0.5, -0.5)


def test_roles_of_a_group_are_not_pooled() -> None:
    rows = [
        row("a/solver", 1.0),
        row("a/judge", 0.3, role="judge"),
        row("b/solver", 0.0),
        row("b/judge", 0.3, role="judge"),
    ]
    result = row_advantages(rows, advantage=dr_grpo_advantages)
    assert result.values == (0.5, 0.0, -0.5, 0.0)
    assert result.zero_variance == (False, True, False, True)
    assert (result.groups, result.zero_variance_groups) == (2, 1)


def test_rows_of_a_rollout_must_agree_on_its_reward() -> None:
    with pytest.raises(TrainingError, match=r"'a' disagree on its reward: 1\.0 and 0\.5"):
        row_advantages([row("a", 1.0), row("a", 0.5)])


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"token_ids": ()}, "no tokens"),
        ({"loss_mask": (False,)}, "differ in length: 2, 1, 2"),
        ({"behavior_logprobs": (0.0, math.nan)}, r"'a' .*behavior_logprobs\[1\] is nan"),
        ({"behavior_logprobs": (0.0, -math.inf)}, r"behavior_logprobs\[1\] is -inf"),
        ({"loss_mask": (True, True)}, "position 0"),
        ({"reward": math.nan}, "reward is nan"),
        ({"weight": 0.0}, "weight is 0.0"),
        ({"policy_version": -1}, "policy_version is -1"),
    ],
)
def test_an_invalid_row_says_what_is_wrong(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        row("a", **({"reward": 0.0} | changes))
