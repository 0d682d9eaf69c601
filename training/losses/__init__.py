"""Losses: pure functions of flat tensors, one entry per trained token.

`N` is the number of trained tokens, over all rows of a microbatch. Masked positions never come in, so what they hold (NaN
included) can't matter: `values[loss_mask]` flattens a padded [B, T] tensor, `loss_mask.nonzero()[:, 0]` is its
`sequence`, the row that each token belongs to. Token losses come back per token; `aggregation` says what each one counts
in the batch, so that a partial sum over any microbatch or rank adds up to the batch's loss.

To add an algorithm: one file here, one line in `LOSSES`.
"""

from collections.abc import Mapping

from aworld_runtime.training.algorithms import LossName
from aworld_runtime.training.losses.base import PolicyLoss, TokenLosses
from aworld_runtime.training.losses.cispo import cispo
from aworld_runtime.training.losses.clipped import clipped_surrogate
from aworld_runtime.training.losses.gspo import gspo
from aworld_runtime.training.losses.reinforce import reinforce

LOSSES: Mapping[LossName, PolicyLoss] = {
    "clipped": clipped_surrogate,
    "gspo": gspo,
    "cispo": cispo,
    "reinforce": reinforce,
}

__all__ = ["LOSSES", "PolicyLoss", "TokenLosses"]
