"""Training rows are the sampler's own tokens."""

import math

import pytest

from aworld_runtime.errors import TrainingError
from aworld_runtime.messages import Completion, Message, Task, VersionSpan
from aworld_runtime.training.projection import rows_of
from aworld_runtime.trajectory import Episode, Trajectory, Turn


def completion(prompt: tuple[int, ...], sampled: tuple[int, ...], version: int = 0) -> Completion:
    return Completion(
        text="x",
        prompt_token_ids=prompt,
        token_ids=sampled,
        behavior_logprobs=tuple(-0.5 for _ in sampled),
        policy="policy",
        version_spans=(VersionSpan(version=version, start=0, end=len(sampled)),),
    )


def episode(*completions: Completion, reward: float | None = 1.0) -> Episode:
    turns = tuple(
        Turn(seq=i, new_messages=(Message(role="user", content="?"),), completion=c)
        for i, c in enumerate(completions, 1)
    )
    return Episode(
        id="e",
        group_id="g",
        task=Task(id="t", prompt="?"),
        trajectories=(Trajectory(role="solver", turns=turns, reward=reward),),
    )


def test_turns_that_extend_one_another_are_one_row() -> None:
    (row,) = rows_of(
        episode(completion((1, 2), (3, 4)), completion((1, 2, 3, 4, 5), (6,), version=1)),
        ["solver"],
    )
    assert row.token_ids == (1, 2, 3, 4, 5, 6)
    assert row.loss_mask == (False, False, True, True, False, True)
    assert [x for x in row.behavior_logprobs if not math.isnan(x)] == [-0.5, -0.5, -0.5]
    assert row.policy_version == 0
    assert row.weight == 1
    assert row.rollout_id == "e/solver"


def test_a_prompt_that_breaks_the_prefix_starts_a_row_that_shares_the_weight() -> None:
    rows = rows_of(episode(completion((1, 2), (3, 4)), completion((1, 2, 9, 5), (6,))), ["solver"])
    assert [row.token_ids for row in rows] == [(1, 2, 3, 4), (1, 2, 9, 5, 6)]
    assert [row.weight for row in rows] == [0.5, 0.5]
    assert len({row.rollout_id for row in rows}) == 1


def test_frozen_roles_give_no_rows() -> None:
    assert rows_of(episode(completion((1,), (2,))), ["verifier"]) == []


def test_a_turn_without_a_policy_version_is_refused() -> None:
    with pytest.raises(TrainingError, match="names no policy version"):
        rows_of(episode(Completion(text="from an ordinary engine")), ["solver"])


def test_an_unscored_rollout_is_refused() -> None:
    with pytest.raises(TrainingError, match="no reward"):
        rows_of(episode(completion((1,), (2,)), reward=None), ["solver"])
