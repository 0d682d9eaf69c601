"""CISPO: clip the importance weight, not the gradient (MiniMax-M1, arXiv:2506.13585, eq. 4).

    loss = -stopgrad(clamp(r, 1 - clip_low, 1 + clip_high)) A logprobs

Every token keeps a gradient. verl clips on both sides, as here; TRL only above, and its epsilon_high is the cap itself
(pass `clip_low=math.inf`, `clip_high=cap - 1` for that).
"""

import torch
from torch import Tensor

from aworld_runtime.training.losses.base import TokenLosses


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence: Tensor,  # noqa: ARG001 - the protocol's
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,  # noqa: ARG001 - the protocol's
) -> TokenLosses:
    """All tensors [N]; `sequence` and `dual_clip` have no part in this loss."""
    ratio = torch.exp(logprobs - old_logprobs).detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return TokenLosses(losses=-weight * advantages * logprobs, ratio=ratio, clipped=weight != ratio)
