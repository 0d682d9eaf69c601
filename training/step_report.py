"""What one call of `Learner.step` did, in plain numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from aworld_runtime.training.advantages import RowAdvantages
from aworld_runtime.training.rows import TrainingRow


@dataclass(frozen=True, slots=True)
class Gradient:
    """Of one optimizer step, before clipping."""

    norm: float
    norms: tuple[float, ...]
    """[P] of each parameter, in the model's order; 0 for one that nothing depends on."""


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """What a row's trained tokens added to the loss; [N] in the order of their positions."""

    logprobs: tuple[float, ...]
    """Of the learner, before the optimizer step that the row is part of."""
    ratios: tuple[float, ...]
    """exp(logprobs - old_logprobs)."""
    corrections: tuple[float, ...]
    """min(exp(old_logprobs - behavior_logprobs), cap)."""
    entropies: tuple[float, ...]
    losses: tuple[float, ...]
    """Corrected, with the terms for KL and entropy."""
    coefficient: float
    """What each of them counts in the batch's loss."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """Means are over trained tokens of all ranks; None where there was nothing to take a mean of."""

    step: int
    """Optimizer steps taken since the model was loaded first."""
    policy_version: int
    """Of the weights that the batch began with."""
    optimizer_steps: int
    """Steps taken on this batch: 0 when nothing in it could be learned from."""
    loss: float
    """Mean over the batch's optimizer steps; 0 when there was none."""
    grad_norm: float | None
    """Before clipping, mean over optimizer steps."""
    kl: float | None
    """KL to the reference policy; without one, k3 between the learner and the behavior policy."""
    entropy: float | None
    """Exact, of the learner's next-token distribution."""
    clip_fraction: float | None
    ratio_mean: float | None
    correction_mean: float | None
    """Of min(exp(old_logprobs - behavior_logprobs), cap)."""
    logprob_gap: float | None
    """|learner - sampler|, over rows sampled by the very weights that the batch began with."""
    lr: float
    """Of the batch's first optimizer step."""
    tokens: int
    """Trained tokens."""
    packed_tokens: int
    """Tokens that went through the model, shared prefixes once a microbatch."""
    row_tokens: int
    """Tokens of all rows given, to compare."""
    rows: int
    rows_dropped: int
    """Without variance in their group, or without a trained token."""
    groups: int
    """(group, role) pairs."""
    zero_variance_groups: int
    staleness_mean: float | None
    staleness_max: int | None
    advantages: tuple[float, ...]
    """[R] of every row given, in order."""
    gradient_norms: tuple[float, ...]
    """Of each parameter, before clipping; one optimizer step after the other."""
    computed_with: Mapping[str, str]
    """See `arithmetic`."""
    seconds: Mapping[str, float]
    """By phase: pack, old_logprobs, forward, backward (with the all-reduce), reduce, optimizer, total."""

    @classmethod
    def of(  # noqa: PLR0913 - the parts of a report, each by name
        cls,
        *,
        rows: Sequence[TrainingRow],
        kept: int,
        advantages: RowAdvantages,
        sums: Mapping[str, float],
        gradients: Sequence[Gradient],
        computed_with: Mapping[str, str],
        lr: float,
        step: int,
        policy_version: int,
        seconds: Mapping[str, float],
    ) -> Self:
        def mean(name: str, count: str = "tokens") -> float | None:
            return sums[name] / sums[count] if sums[count] else None

        staleness = [policy_version - row.policy_version for row in rows]
        steps = len(gradients)
        return cls(
            step=step,
            policy_version=policy_version,
            optimizer_steps=steps,
            loss=sums["loss"] / steps if steps else 0.0,
            grad_norm=sum(gradient.norm for gradient in gradients) / steps if steps else None,
            kl=mean("kl"),
            entropy=mean("entropy"),
            clip_fraction=mean("clipped"),
            ratio_mean=mean("ratio"),
            correction_mean=mean("correction"),
            logprob_gap=mean("gap", "gap_tokens"),
            lr=lr,
            tokens=int(sums["tokens"]),
            packed_tokens=int(sums["packed_tokens"]),
            row_tokens=sum(len(row.token_ids) for row in rows),
            rows=len(rows),
            rows_dropped=len(rows) - kept,
            groups=advantages.groups,
            zero_variance_groups=advantages.zero_variance_groups,
            staleness_mean=sum(staleness) / len(staleness) if staleness else None,
            staleness_max=max(staleness, default=None),
            advantages=advantages.values,
            gradient_norms=tuple(norm for gradient in gradients for norm in gradient.norms),
            computed_with=computed_with,
            seconds=seconds,
        )

    @property
    def metrics(self) -> dict[str, float]:
        """Flat, under the names that dashboards know; what has no value is left out."""
        values: dict[str, float | None] = {
            "actor/loss": self.loss,
            "actor/grad_norm": self.grad_norm,
            "actor/kl": self.kl,
            "actor/entropy": self.entropy,
            "actor/clip_fraction": self.clip_fraction,
            "actor/ratio": self.ratio_mean,
            "actor/correction": self.correction_mean,
            "actor/logprob_gap": self.logprob_gap,
            "actor/lr": self.lr,
            "actor/optimizer_steps": self.optimizer_steps,
            "batch/tokens": self.tokens,
            "batch/packed_tokens": self.packed_tokens,
            "batch/row_tokens": self.row_tokens,
            "batch/rows": self.rows,
            "batch/rows_dropped": self.rows_dropped,
            "batch/groups": self.groups,
            "batch/zero_variance_groups": self.zero_variance_groups,
            "batch/staleness_mean": self.staleness_mean,
            "batch/staleness_max": self.staleness_max,
        }
        values |= {f"perf/train_{phase}_s": seconds for phase, seconds in self.seconds.items()}
        return {name: value for name, value in values.items() if value is not None}
