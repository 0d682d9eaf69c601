"""What one token's loss counts in the batch's loss.

Every aggregation here gives each row one coefficient, the same for all its tokens and known before any forward pass:

    loss = sum over tokens of coefficient[row of token] * token loss

so a microbatch or a rank adds its own part and the parts sum to the batch's loss exactly; there is no mean of means. Pure
functions of plain numbers. A row without trained tokens gets 0, and a batch without any has loss 0, never NaN.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence

from aworld_runtime.training.algorithms import AggregationName

Aggregation = Callable[[Sequence[int], Sequence[float], Sequence[Hashable]], tuple[float, ...]]
"""From [R] trained-token counts, row weights and rollouts to [R] coefficients."""


def token_mean(token_counts: Sequence[int], *, denominator: int | None = None) -> tuple[float, ...]:
    """1 / all trained tokens (DAPO, arXiv:2503.14476).

    Splitting a rollout in rows changes nothing, so row weights have no part. `denominator` replaces the count where rows
    that were dropped shall stay in it (TRL keeps zero-variance groups; here they are out).
    """
    total = sum(token_counts) if denominator is None else denominator
    return tuple(1 / total if count and total else 0.0 for count in token_counts)


def sequence_mean(
    token_counts: Sequence[int], *, weights: Sequence[float], denominator: float | None = None
) -> tuple[float, ...]:
    """Weight / (own trained tokens * sum of weights): the mean over rows of each row's token mean (GRPO's paper).

    Rows without trained tokens stay in the denominator, as in verl and TRL.
    """
    total = sum(weights) if denominator is None else denominator
    return tuple(
        weight / (count * total) if count else 0.0
        for count, weight in zip(token_counts, weights, strict=True)
    )


def rollout_mean(token_counts: Sequence[int], *, rollouts: Sequence[Hashable]) -> tuple[float, ...]:
    """1 / (the rollout's trained tokens, over all its rows * number of rollouts).

    The mean over rollouts of each rollout's token mean; a rollout split in rows counts as if it were whole.
    """
    tokens: dict[Hashable, int] = {}
    for rollout, count in zip(rollouts, token_counts, strict=True):
        tokens[rollout] = tokens.get(rollout, 0) + count
    return tuple(
        1 / (tokens[rollout] * len(tokens)) if count else 0.0
        for rollout, count in zip(rollouts, token_counts, strict=True)
    )


def sequence_sum(token_counts: Sequence[int], *, length: float = 1.0) -> tuple[float, ...]:
    """1 / (rows * length): token losses summed per row, mean over rows; Dr. GRPO's with `length` a constant maximum."""
    return tuple(1 / (len(token_counts) * length) if count else 0.0 for count in token_counts)


AGGREGATIONS: Mapping[AggregationName, Aggregation] = {
    "token_mean": lambda counts, _weights, _rollouts: token_mean(counts),
    "sequence_mean": lambda counts, weights, _rollouts: sequence_mean(counts, weights=weights),
    "rollout_mean": lambda counts, _weights, rollouts: rollout_mean(counts, rollouts=rollouts),
}
