"""GSPO: the importance ratio of a whole sequence (arXiv:2507.18071).

    s_i  = exp(mean over the sequence's tokens of (logprobs - old_logprobs))
    loss = max(-A s_i, -A clamp(s_i, 1 - clip_low, 1 + clip_high))   on each of its tokens

The paper clips at 3e-4 / 4e-4 and takes the mean over sequences; verl 0.9.1 aggregates by token unless told otherwise. A
sequence is one row.
"""

import torch
from torch import Tensor

from aworld_runtime.training.losses.base import TokenLosses
from aworld_runtime.training.losses.clipped import surrogate


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> TokenLosses:
    """All tensors [N]; `sequence` (int64) numbers the row of each token, which must be whole here."""
    return surrogate(
        torch.exp(sequence_mean(logprobs - old_logprobs, sequence)),
        advantages,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )


def sequence_sum(values: Tensor, sequence: Tensor) -> Tensor:
    """[N] the sum over the sequence of each token, back at that token."""
    sums = values.new_zeros(int(sequence.max()) + 1 if sequence.numel() else 0)
    return sums.index_add(0, sequence, values)[sequence]


def sequence_mean(values: Tensor, sequence: Tensor) -> Tensor:
    """[N] the mean over the sequence of each token, back at that token."""
    return sequence_sum(values, sequence) / sequence_sum(torch.ones_like(values), sequence)
