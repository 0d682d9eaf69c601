# torch annotates itself only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
"""Every number of grpo_fixtures.json, value and gradient, in float64 to 1e-9.

The fixtures hold what verl, TRL, AReaL and others compute; masked positions are filled with NaN here, which none of the
numbers may notice.
"""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from aworld_runtime.training import losses
from aworld_runtime.training.advantages import (
    dr_grpo_advantages,
    grpo_advantages,
    is_zero_variance,
    rloo_advantages,
    row_advantages,
)
from aworld_runtime.training.algorithms import KLName
from aworld_runtime.training.losses import aggregation, correction
from aworld_runtime.training.losses.cispo import cispo
from aworld_runtime.training.losses.clipped import clipped_surrogate
from aworld_runtime.training.losses.gspo import gspo
from aworld_runtime.training.losses.kl import KL_ESTIMATORS
from aworld_runtime.training.losses.reinforce import reinforce
from aworld_runtime.training.overlong import drop_truncated, soft_overlong_penalty
from aworld_runtime.training.rows import TrainingRow

FILE = json.loads((Path(__file__).parent / "fixtures" / "grpo_fixtures.json").read_text())
FIXTURES: dict[str, Any] = FILE["fixtures"]
INPUTS: dict[str, Any] = FILE["inputs"]
REWARDS: list[float] = INPUTS["rewards"]
GROUPS: list[int] = INPUTS["group_ids"]
MASK = torch.tensor(INPUTS["trainable_mask"], dtype=torch.bool)
ROWS, LENGTH = MASK.shape

TESTED = {
    "grpo_token_mean",
    "dr_grpo",
    "dapo",
    "gspo",
    "rloo",
    "tis",
    "cispo",
    "kl",
    "shard_invariance",
    "edge_cases",
    "fanout_rollout_baseline",
    "role_grouped_advantages",
}


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def padded(name: str) -> Tensor:
    values = tensor(INPUTS[name])
    return values.masked_fill(~MASK, math.nan)


NEW, OLD, REF, SAMPLER = map(
    padded, ("new_logprobs", "old_logprobs", "ref_logprobs", "sampler_logprobs")
)


def expected(fixture: str) -> dict[str, Any]:
    return FIXTURES[fixture]["expected"]


def close(actual: Any, wanted: Any) -> None:
    torch.testing.assert_close(
        torch.as_tensor(actual, dtype=torch.float64),
        torch.as_tensor(wanted, dtype=torch.float64),
        rtol=0,
        atol=FILE["tolerance"],
    )


def grouped(advantage: Callable[[list[float]], Sequence[float]]) -> list[float]:
    """[R] advantages of the file's two groups of three."""
    return [*advantage(REWARDS[:3]), *advantage(REWARDS[3:])]


def counts(mask: Tensor) -> list[int]:
    return mask.sum(dim=1).tolist()


Terms = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def loss_and_grad(
    terms: Terms,
    advantages: Sequence[float],
    coefficients: Sequence[float],
    *,
    mask: Tensor = MASK,
    new: Tensor = NEW,
    old: Tensor = OLD,
) -> tuple[Tensor, Tensor]:
    """`terms(logprobs, old_logprobs, advantages, sequence)` gives [N] token losses."""
    logprobs = new.clone().requires_grad_()
    sequence = mask.nonzero()[:, 0]
    token_losses = terms(
        logprobs[mask],
        old[mask],
        tensor(advantages)[sequence],
        sequence,
    )
    loss = (token_losses * tensor(coefficients)[sequence]).sum()
    (grad,) = torch.autograd.grad(loss, logprobs)
    return loss.detach(), grad


def surrogate(low: float = 0.2, high: float = 0.2, dual: float | None = None) -> Terms:
    return lambda new, old, advantages, sequence: (
        clipped_surrogate(
            new, old, advantages, sequence, clip_low=low, clip_high=high, dual_clip=dual
        ).losses
    )


def weigh(weight: Tensor) -> Terms:
    return lambda new, old, adv, seq: weight * surrogate()(new, old, adv, seq)


GRPO = grouped(grpo_advantages)
TOKEN_MEAN = aggregation.token_mean(counts(MASK))
SEQUENCE_MEAN = aggregation.sequence_mean(counts(MASK), weights=[1.0] * ROWS)


def test_no_fixture_is_left_out() -> None:
    assert set(FIXTURES) == TESTED


def test_grpo_token_mean() -> None:
    want = expected("grpo_token_mean")
    close(GRPO, want["advantages_eps_1e6"])
    close(
        grouped(lambda rewards: grpo_advantages(rewards, std_eps=1e-4)), want["advantages_eps_1e4"]
    )
    for terms, coefficients, key in (
        (surrogate(), TOKEN_MEAN, ""),
        (surrogate(), SEQUENCE_MEAN, "_seq_mean_token_mean"),
        (surrogate(dual=3.0), TOKEN_MEAN, "_dual_clip_c3"),
    ):
        loss, grad = loss_and_grad(terms, GRPO, coefficients)
        close(loss, want[f"loss{key}"])
        close(grad, want[f"grad{key}"])


def test_dr_grpo() -> None:
    want = expected("dr_grpo")
    advantages = grouped(dr_grpo_advantages)
    close(advantages, want["advantages"])
    length = FIXTURES["dr_grpo"]["params"]["max_length"]
    coefficients = aggregation.sequence_sum(counts(MASK), length=length)
    loss, grad = loss_and_grad(surrogate(), advantages, coefficients)
    close(loss, want["loss"])
    close(grad, want["grad"])


def test_dapo() -> None:
    want, params = expected("dapo"), FIXTURES["dapo"]["params"]
    assert [
        not is_zero_variance([r for r, g in zip(REWARDS, GROUPS, strict=True) if g == group])
        for group in GROUPS
    ] == [bool(keep) for keep in params["keep_group"]]
    filtered = torch.tensor(
        [
            drop_truncated(tuple(row), truncated=bool(truncated))
            for row, truncated in zip(MASK.tolist(), params["truncated"], strict=True)
        ]
    )
    kept = filtered & torch.tensor(params["keep_group"], dtype=torch.bool)[:, None]
    close(kept, want["loss_mask"])
    close(GRPO, want["advantages"])
    terms = surrogate(params["clip_low"], params["clip_high"])
    loss, grad = loss_and_grad(terms, GRPO, aggregation.token_mean(counts(kept)), mask=kept)
    close(loss, want["loss"])
    close(grad, want["grad"])
    loss, _ = loss_and_grad(terms, GRPO, aggregation.token_mean(counts(filtered)), mask=filtered)
    close(loss, want["loss_without_dynamic_sampling"])
    loss, _ = loss_and_grad(
        terms,
        GRPO,
        aggregation.token_mean(counts(kept), denominator=int(filtered.sum())),
        mask=kept,
    )
    close(loss, want["loss_without_dynamic_sampling"])


def test_soft_overlong_penalty() -> None:
    want = expected("dapo")["soft_overlong_penalty"]
    for length, penalty in want["table"].items():
        close(
            soft_overlong_penalty(int(length), max_length=want["l_max"], cache=want["l_cache"]),
            penalty,
        )


def test_gspo() -> None:
    want, params = expected("gspo"), FIXTURES["gspo"]["params"]
    close(GRPO, want["advantages"])

    def terms(new: Tensor, old: Tensor, advantages: Tensor, sequence: Tensor) -> Tensor:
        out = gspo(new, old, advantages, sequence, **params)
        close(out.ratio, tensor(want["sequence_ratio"])[sequence])
        return out.losses

    loss, grad = loss_and_grad(terms, GRPO, SEQUENCE_MEAN)
    close(loss, want["loss"])
    close(grad, want["grad"])
    close(loss_and_grad(terms, GRPO, TOKEN_MEAN)[0], want["loss_token_mean"])


def test_rloo() -> None:
    want = expected("rloo")
    advantages = grouped(rloo_advantages)
    close(advantages, want["advantages"])
    loss, grad = loss_and_grad(surrogate(), advantages, TOKEN_MEAN)
    close(loss, want["loss_ppo_token_mean"])
    close(grad, want["grad_ppo_token_mean"])
    loss, grad = loss_and_grad(
        lambda new, old, adv, seq: reinforce(new, old, adv, seq).losses,
        advantages,
        aggregation.sequence_sum(counts(MASK)),
    )
    close(loss, want["loss_reinforce_sequence"])
    close(grad, want["grad_reinforce_sequence"])


def test_importance_correction() -> None:
    want, params = expected("tis"), FIXTURES["tis"]["params"]
    sequence, old, behavior = MASK.nonzero()[:, 0], OLD[MASK], SAMPLER[MASK]
    truncated = correction.truncated(old, behavior, cap=params["token_cap"])
    icepop = correction.icepop(old, behavior, low=params["icepop"][0], high=params["icepop"][1])
    close(truncated, tensor(want["token_weight_truncated"])[MASK])
    close(icepop, tensor(want["token_weight_icepop"])[MASK])
    close(
        correction.sequence_weight(old, behavior, sequence),
        tensor(want["sequence_weight"])[sequence],
    )
    close(
        correction.geometric_sequence_weight(old, behavior, sequence),
        tensor(want["geometric_sequence_weight"])[sequence],
    )
    close(correction.effective_sample_fraction(truncated), want["ess_fraction_token_truncated"])
    weights = {
        "token_truncate_2": truncated,
        "token_icepop_05_2": icepop,
        "sequence_truncate_2": correction.sequence_truncated(
            old, behavior, sequence, cap=params["seq_truncate_cap"]
        ),
        "sequence_mask_3": correction.sequence_masked(
            old, behavior, sequence, cap=params["seq_mask_cap"]
        ),
    }
    assert set(weights) == set(want["loss"])
    for name, weight in weights.items():
        close(loss_and_grad(weigh(weight), GRPO, TOKEN_MEAN)[0], want["loss"][name])
    close(loss_and_grad(weigh(truncated), GRPO, TOKEN_MEAN)[1], want["grad_token_truncate_2"])


@pytest.mark.parametrize("key,low,high", [("two_sided", 0.2, 0.28), ("upper_only", math.inf, 0.28)])
def test_cispo(key: str, low: float, high: float) -> None:
    want = expected("cispo")
    loss, grad = loss_and_grad(
        lambda new, old, adv, seq: cispo(new, old, adv, seq, clip_low=low, clip_high=high).losses,
        GRPO,
        TOKEN_MEAN,
    )
    close(loss, want[f"loss_{key}"])
    close(grad, want[f"grad_{key}"])


def test_kl() -> None:
    want = expected("kl")
    assert set(KL_ESTIMATORS) == set(want["value"])
    for name, value in want["value"].items():
        estimator = KL_ESTIMATORS[cast("KLName", name)]
        loss, grad = loss_and_grad(
            lambda new, *_, estimator=estimator: estimator(new, REF[MASK]),
            GRPO,
            TOKEN_MEAN,
        )
        close(loss, value)
        close(grad, want["grad"][name])
    beta = FIXTURES["kl"]["params"]["beta"]
    loss, grad = loss_and_grad(
        lambda new, old, adv, seq: (
            surrogate()(new, old, adv, seq) + beta * KL_ESTIMATORS["k3"](new, REF[MASK])
        ),
        GRPO,
        TOKEN_MEAN,
    )
    close(loss, want["grpo_plus_k3_loss"])
    close(grad, want["grpo_plus_k3_grad"])


def test_shards_of_the_batch_add_up_to_its_loss() -> None:
    want = expected("shard_invariance")
    loss, grad = torch.zeros((), dtype=torch.float64), torch.zeros_like(NEW)
    for start, stop in FIXTURES["shard_invariance"]["params"]["shards"]:
        shard = MASK & (torch.arange(ROWS) >= start)[:, None] & (torch.arange(ROWS) < stop)[:, None]
        part, part_grad = loss_and_grad(surrogate(), GRPO, TOKEN_MEAN, mask=shard)
        loss, grad = loss + part, grad + part_grad
    close(loss, want["loss"])
    close(grad, want["grad"])


def test_edge_cases() -> None:
    want = expected("edge_cases")
    close(grpo_advantages([1.0, 1.0, 1.0]), want["zero_variance_group_advantages"])
    nothing = torch.zeros_like(MASK)
    for coefficients in (
        aggregation.token_mean(counts(nothing)),
        aggregation.sequence_mean(counts(nothing), weights=[1.0] * ROWS),
        aggregation.rollout_mean(counts(nothing), rollouts=range(ROWS)),
    ):
        loss, grad = loss_and_grad(surrogate(), GRPO, coefficients, mask=nothing)
        close(loss, want["all_masked_batch"]["ours_should_be"])
        close(grad, torch.zeros_like(NEW))
    noisy = want["float_noise_group_0_1_x3"]["rewards"]
    for advantage in (grpo_advantages, dr_grpo_advantages, rloo_advantages):
        assert advantage(noisy) == (0.0, 0.0, 0.0)
        assert advantage([0.7]) == (0.0,)


def test_fanout_rollout_baseline() -> None:
    want = expected("fanout_rollout_baseline")
    given = want["inputs"]
    mask = torch.tensor(given["trainable_mask"], dtype=torch.bool)
    rollouts: list[int] = given["rollout_ids"]
    rows = [
        TrainingRow(
            rollout_id=f"episode-{rollout}/solver",
            group_id="prompt",
            role="solver",
            token_ids=(0,) * 5,
            loss_mask=(False, *trained),
            behavior_logprobs=(math.nan, -1.0, -1.0, -1.0, -1.0),
            policy="policy",
            policy_version=0,
            reward=reward,
            weight=1 / rollouts.count(rollout),
        )
        for rollout, reward, trained in zip(
            rollouts, given["row_rewards"], mask.tolist(), strict=True
        )
    ]
    advantages = row_advantages(rows, advantage=dr_grpo_advantages).values
    close(advantages, want["advantages"])
    loss, grad = loss_and_grad(
        surrogate(),
        advantages,
        aggregation.rollout_mean(counts(mask), rollouts=rollouts),
        mask=mask,
        new=tensor(given["new_logprobs"]),
        old=tensor(given["old_logprobs"]),
    )
    close(loss, want["loss_per_rollout_mean"])
    close(grad, want["grad"])


def test_role_grouped_advantages() -> None:
    want = expected("role_grouped_advantages")
    rows = [
        TrainingRow(
            rollout_id=f"episode-{index % 4}/{role}",
            group_id="task",
            role=role,
            token_ids=(0, 1),
            loss_mask=(False, True),
            behavior_logprobs=(math.nan, -1.0),
            policy="policy",
            policy_version=0,
            reward=reward,
        )
        for index, (role, reward) in enumerate(zip(want["roles"], want["rewards"], strict=True))
    ]
    close(row_advantages(rows).values, want["advantages"])


def test_registry_names_every_loss() -> None:
    assert set(losses.LOSSES) == {"clipped", "gspo", "cispo", "reinforce"}
