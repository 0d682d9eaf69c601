"""The shape that every policy loss has."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """The losses of N trained tokens, not yet aggregated, with what is worth watching beside them."""

    losses: Tensor
    """[N] with gradient to the logprobs."""
    ratio: Tensor
    """[N] detached exp(logprobs - old_logprobs), per sequence where the algorithm's ratio is."""
    clipped: Tensor
    """[N] bool: the clip changed this token's loss."""


class PolicyLoss(Protocol):
    """From the logprobs of N trained tokens to their losses."""

    def __call__(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        sequence: Tensor,
        *,
        clip_low: float,
        clip_high: float,
        dual_clip: float | None = None,
    ) -> TokenLosses: ...
