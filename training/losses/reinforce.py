"""REINFORCE: loss = -A logprobs per token, without ratio or clip (Williams 1992; RLOO's form, arXiv:2402.14740).

On policy, the clipped surrogate has the same gradient. With `sequence_sum` coefficients (aggregation.py) it is RLOO's
-mean over sequences of A * log p(sequence).
"""

import torch
from torch import Tensor

from aworld_runtime.training.losses.base import TokenLosses


def reinforce(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence: Tensor,  # noqa: ARG001 - the protocol's
    *,
    clip_low: float = 0.0,  # noqa: ARG001 - the protocol's
    clip_high: float = 0.0,  # noqa: ARG001 - the protocol's
    dual_clip: float | None = None,  # noqa: ARG001 - the protocol's
) -> TokenLosses:
    """All tensors [N]; only `logprobs` and `advantages` have a part in this loss."""
    ratio = torch.exp(logprobs - old_logprobs).detach()
    return TokenLosses(
        losses=-advantages * logprobs,
        ratio=ratio,
        clipped=torch.zeros_like(ratio, dtype=torch.bool),
    )
