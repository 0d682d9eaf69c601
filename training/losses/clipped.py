"""The clipped surrogate of PPO, as GRPO and DAPO use it.

With r = exp(logprobs - old_logprobs), per token:

    loss = max(-A r, -A clamp(r, 1 - clip_low, 1 + clip_high))

PPO (arXiv:1707.06347, eq. 7); clip_high > clip_low is DAPO's clip-higher (arXiv:2503.14476). Dual clip
(arXiv:1912.09729) bounds the loss at -A dual_clip where A < 0. verl turns it on by default with 3, which changes the
loss; here it is off.
"""

import torch
from torch import Tensor

from aworld_runtime.training.losses.base import TokenLosses


def clipped_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence: Tensor,  # noqa: ARG001 - the protocol's
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> TokenLosses:
    """All tensors [N]; `sequence` is not used, since the ratio is per token."""
    return surrogate(
        torch.exp(logprobs - old_logprobs),
        advantages,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )


def surrogate(
    ratio: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> TokenLosses:
    """[N] losses of a [N] ratio that carries the gradient."""
    unclipped = -advantages * ratio
    losses = torch.maximum(unclipped, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip is not None:
        bounded = torch.minimum(losses, -advantages * dual_clip)
        losses = torch.where(advantages < 0, bounded, losses)
    return TokenLosses(losses=losses, ratio=ratio.detach(), clipped=(losses != unclipped).detach())
