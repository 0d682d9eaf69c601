"""Weights that correct for a sampler whose logprobs differ from the learner's at the same tokens.

The sampler computes in another precision, with other kernels, or some versions ago. Each weight multiplies the token's
loss, is detached, and leaves the denominator alone (decoupled PPO, arXiv:2505.24298; truncated importance sampling,
fengyao.notion.site/off-policy-rl). w = exp(old_logprobs - behavior_logprobs):

    truncated          min(w, cap)                       per token; the default, cap 2
    icepop             w if low <= w <= high, else 0     per token
    sequence_truncated min(prod of w, cap)               per sequence
    sequence_masked    prod of w if it is <= cap, else 0 per sequence; TRL's default with cap 3
"""

import torch
from torch import Tensor

from aworld_runtime.training.losses.gspo import sequence_mean, sequence_sum


def truncated(old_logprobs: Tensor, behavior_logprobs: Tensor, *, cap: float) -> Tensor:
    """[N] min(exp(old - behavior), cap)."""
    return torch.exp(old_logprobs - behavior_logprobs).detach().clamp(max=cap)


def icepop(old_logprobs: Tensor, behavior_logprobs: Tensor, *, low: float, high: float) -> Tensor:
    """[N] exp(old - behavior) inside [low, high], 0 outside."""
    weight = torch.exp(old_logprobs - behavior_logprobs).detach()
    return torch.where((weight >= low) & (weight <= high), weight, torch.zeros_like(weight))


def sequence_weight(old_logprobs: Tensor, behavior_logprobs: Tensor, sequence: Tensor) -> Tensor:
    """[N] the product over the sequence of exp(old - behavior), at each of its tokens."""
    return torch.exp(sequence_sum(old_logprobs - behavior_logprobs, sequence)).detach()


def geometric_sequence_weight(
    old_logprobs: Tensor, behavior_logprobs: Tensor, sequence: Tensor
) -> Tensor:
    """[N] the geometric mean over the sequence of exp(old - behavior), at each of its tokens."""
    return torch.exp(sequence_mean(old_logprobs - behavior_logprobs, sequence)).detach()


def sequence_truncated(
    old_logprobs: Tensor, behavior_logprobs: Tensor, sequence: Tensor, *, cap: float
) -> Tensor:
    """[N] min(sequence weight, cap)."""
    return sequence_weight(old_logprobs, behavior_logprobs, sequence).clamp(max=cap)


def sequence_masked(
    old_logprobs: Tensor, behavior_logprobs: Tensor, sequence: Tensor, *, cap: float
) -> Tensor:
    """[N] the sequence weight where it is at most cap, 0 elsewhere."""
    weight = sequence_weight(old_logprobs, behavior_logprobs, sequence)
    return torch.where(weight <= cap, weight, torch.zeros_like(weight))


def effective_sample_fraction(weights: Tensor) -> Tensor:
    """Kish: (sum w)^2 / (N sum w^2) of [N] weights, in (0, 1]; 1 means that no weight was lost to mismatch."""
    return weights.sum().square() / (weights.numel() * weights.square().sum())
