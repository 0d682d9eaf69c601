"""Estimators of KL(policy || reference) from the policy's own samples (Schulman, joschu.net/blog/kl-approx.html).

With d = logprobs - ref_logprobs, per token:

    k1  = d                unbiased, high variance, its gradient says nothing about the reference
    k2  = d^2 / 2          biased in value, right in gradient
    k3  = exp(-d) + d - 1  unbiased, never negative; the default
    k3+ = the value of k3 with the gradient of k2 (verl)
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from aworld_runtime.training.algorithms import KLName

KLEstimator = Callable[[Tensor, Tensor], Tensor]


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """[N] and [N] to [N]."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """[N] and [N] to [N]."""
    return (logprobs - ref_logprobs).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """[N] and [N] to [N]."""
    difference = logprobs - ref_logprobs
    return torch.exp(-difference) + difference - 1


def k3_plus(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """[N] and [N] to [N]."""
    gradient = k2(logprobs, ref_logprobs)
    return k3(logprobs, ref_logprobs).detach() + gradient - gradient.detach()


KL_ESTIMATORS: Mapping[KLName, KLEstimator] = {"k1": k1, "k2": k2, "k3": k3, "k3+": k3_plus}
