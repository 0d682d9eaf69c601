# torch annotates itself only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
import math

import pytest
import torch
from torch import Tensor

from aworld_runtime.training.algorithms import KLName, LossName
from aworld_runtime.training.losses import LOSSES, aggregation, correction
from aworld_runtime.training.losses.clipped import clipped_surrogate
from aworld_runtime.training.losses.kl import KL_ESTIMATORS


def t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


SEQUENCE = torch.tensor([0, 0, 1])


def clipped(logprobs: Tensor, advantages: Tensor) -> Tensor:
    old = torch.zeros_like(logprobs)
    return clipped_surrogate(
        logprobs, old, advantages, SEQUENCE, clip_low=0.2, clip_high=0.28
    ).losses


def test_hand_computed_three_token_loss() -> None:
    """Ratios 1.5, 1.0 and 0.5 with advantages 2, -1 and 1: clipped at 1.28, free, free."""
    losses = clipped(t(math.log(1.5), 0.0, math.log(0.5)), t(2.0, -1.0, 1.0))
    assert losses.tolist() == pytest.approx([-2.56, 1.0, -0.5], abs=1e-12)
    assert (losses.sum() / 3).item() == pytest.approx(-2.06 / 3, abs=1e-12)


@pytest.mark.parametrize(
    "ratio,advantage,has_gradient",
    [
        (1.5, 1.0, False),
        (1.5, -1.0, True),
        (0.5, 1.0, True),
        (0.5, -1.0, False),
        (1.1, 1.0, True),
        (0.9, -1.0, True),
    ],
)
def test_clip_is_active_where_the_ratio_has_moved_far_enough(
    ratio: float, advantage: float, has_gradient: bool
) -> None:
    logprobs = t(math.log(ratio)).requires_grad_()
    out = clipped_surrogate(
        logprobs, t(0.0), t(advantage), SEQUENCE[:1], clip_low=0.2, clip_high=0.28
    )
    (grad,) = torch.autograd.grad(out.losses.sum(), logprobs)
    assert bool(grad != 0) == has_gradient
    assert bool(out.clipped) != has_gradient


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "gspo"])
def test_on_policy_every_token_loss_has_the_gradient_of_reinforce(name: LossName) -> None:
    logprobs = t(-0.5, -1.0, -2.0).requires_grad_()
    advantages = t(1.0, 1.0, -0.5)
    out = LOSSES[name](
        logprobs, logprobs.detach(), advantages, SEQUENCE, clip_low=0.2, clip_high=0.28
    )
    (grad,) = torch.autograd.grad(out.losses.sum(), logprobs)
    assert out.ratio.tolist() == [1.0, 1.0, 1.0]
    assert grad.tolist() == (-advantages).tolist()


@pytest.mark.parametrize("name", LOSSES)
def test_a_masked_position_may_hold_nan(name: LossName) -> None:
    padded = torch.tensor([[-0.5, math.nan, -1.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, False, True]])
    old = padded.detach() - 0.1
    out = LOSSES[name](
        padded[mask], old[mask], t(1.0, 1.0), mask.nonzero()[:, 0], clip_low=0.2, clip_high=0.28
    )
    (grad,) = torch.autograd.grad(out.losses.sum(), padded)
    assert torch.isfinite(out.losses).all()
    assert grad[0, 1] == 0
    assert torch.isfinite(grad).all()


@pytest.mark.parametrize("name", LOSSES)
def test_no_trained_token_gives_zero_and_no_nan(name: LossName) -> None:
    nothing = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    out = LOSSES[name](
        nothing,
        nothing.detach(),
        nothing.detach(),
        torch.zeros(0, dtype=torch.int64),
        clip_low=0.2,
        clip_high=0.2,
    )
    assert out.losses.sum().item() == 0.0


def test_dual_clip_bounds_the_loss_of_a_bad_token_only() -> None:
    def loss(advantage: float, dual_clip: float | None) -> float:
        return clipped_surrogate(
            t(math.log(10.0)),
            t(0.0),
            t(advantage),
            SEQUENCE[:1],
            clip_low=0.2,
            clip_high=0.2,
            dual_clip=dual_clip,
        ).losses.item()

    assert loss(-1.0, None) == pytest.approx(10.0)
    assert loss(-1.0, 3.0) == pytest.approx(3.0)
    assert loss(1.0, 3.0) == loss(1.0, None) == pytest.approx(-1.2)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_kl_to_itself_is_zero_with_zero_gradient_except_k1(name: KLName) -> None:
    logprobs = t(-1.0).requires_grad_()
    value = KL_ESTIMATORS[name](logprobs, logprobs.detach())
    (grad,) = torch.autograd.grad(value.sum(), logprobs)
    assert value.item() == 0.0
    assert grad.item() == (1.0 if name == "k1" else 0.0)


def test_correction_is_capped_and_carries_no_gradient() -> None:
    old = t(0.0, -1.0).requires_grad_()
    weight = correction.truncated(old, t(-5.0, -0.5), cap=2.0)
    assert weight.tolist() == pytest.approx([2.0, math.exp(-0.5)])
    assert not weight.requires_grad


def test_token_mean_does_not_notice_a_split_rollout() -> None:
    whole = aggregation.token_mean([6, 4])
    split = aggregation.token_mean([2, 4, 4])
    assert whole[0] == split[0] == split[1] == 1 / 10


def test_row_weights_share_the_rollout_in_a_sequence_mean() -> None:
    coefficients = aggregation.sequence_mean([2, 2, 4], weights=[0.5, 0.5, 1.0])
    assert coefficients == pytest.approx([0.125, 0.125, 0.125])


def test_a_row_without_trained_tokens_counts_nothing() -> None:
    assert aggregation.token_mean([0, 2]) == (0.0, 0.5)
    assert aggregation.sequence_mean([0, 2], weights=[1.0, 1.0]) == (0.0, 0.25)
    assert aggregation.rollout_mean([0, 2], rollouts=["a", "a"]) == (0.0, 0.5)
