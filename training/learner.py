"""The learner: rows in, one policy improved by one batch, on every rank alike.

    rows ─▶ advantages ─▶ drop zero variance ─▶ minibatches ─▶ shards ─▶ microbatches (packs)
                                                                            │ forward, loss, backward
          weights ◀─ optimizer step ◀─ clip ◀─ all-reduce of gradients ◀────┘

All ranks are given the same rows and plan the same minibatches; each packs its own shard. Every token's coefficient is
known from the whole minibatch before any forward pass, so microbatches and ranks only add. Exactly one backward pass a
rank and optimizer step talks to the others (an empty shard takes part with a pass that trains nothing), so shards of
different size can't hang. Nothing here knows of the bus, the sampler or where rows come from.
"""

# torch and transformers annotate themselves only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import gc
import json
import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

import torch
from pydantic import JsonValue
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from aworld_runtime import telemetry
from aworld_runtime.errors import CheckpointError, NonFiniteLossError, TrainingError
from aworld_runtime.training.advantages import ADVANTAGES, row_advantages
from aworld_runtime.training.arithmetic import arithmetic
from aworld_runtime.training.checkpoint import (
    Checkpoint,
    CheckpointState,
    load_checkpoint,
    save_checkpoint,
)
from aworld_runtime.training.export import export_model
from aworld_runtime.training.learner_config import LearnerConfig
from aworld_runtime.training.losses import LOSSES
from aworld_runtime.training.losses import correction as correction_weights
from aworld_runtime.training.losses.aggregation import AGGREGATIONS
from aworld_runtime.training.losses.kl import KL_ESTIMATORS, k3
from aworld_runtime.training.packing import Pack, cut, pack, partition, prefix_order
from aworld_runtime.training.policy import PolicyModel, load_model
from aworld_runtime.training.ranks import ALONE, Ranks
from aworld_runtime.training.rows import TrainingRow, encode_rows
from aworld_runtime.training.step_report import Gradient, StepReport, TokenTerms

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(slots=True)
class _Microbatch:
    """One forward pass; [N] tensors hold one entry per trained token."""

    rows: Sequence[TrainingRow]
    pack: Pack
    advantages: Tensor
    coefficients: Tensor
    behavior_logprobs: Tensor
    equal_weights: Tensor
    """[N] bool: sampled by the very weights that the learner holds when the batch begins."""
    old_logprobs: Tensor | None = None


@dataclass(slots=True)
class _Sums:
    """Sums over trained tokens; they add over microbatches, ranks and minibatches."""

    loss: float = 0.0
    tokens: float = 0.0
    clipped: float = 0.0
    ratio: float = 0.0
    correction: float = 0.0
    kl: float = 0.0
    entropy: float = 0.0
    gap: float = 0.0
    gap_tokens: float = 0.0
    packed_tokens: float = 0.0

    def add(self, other: "_Sums") -> None:
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)

    def over(self, ranks: Ranks) -> "_Sums":
        values = torch.tensor(list(asdict(self).values()), dtype=torch.float64)
        return _Sums(*cast("list[float]", ranks.sum(values).tolist()))


@dataclass(slots=True)
class _Clock:
    seconds: dict[str, float] = field(default_factory=dict[str, float])

    @contextmanager
    def __call__(self, phase: str) -> Generator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


class Learner:
    """Holds a policy's weights and its optimizer; `step` trains them on one batch of rows."""

    def __init__(
        self,
        model_path: Path,
        config: LearnerConfig,
        *,
        ranks: Ranks = ALONE,
        failures: Path | None = None,
    ) -> None:
        """Load the Hugging Face folder `model_path`. A batch whose loss is not finite is saved into `failures`."""
        torch.manual_seed(config.seed)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self.config = config
        self.ranks = ranks
        self.steps = 0
        """Optimizer steps taken."""
        self.watch: Callable[[TrainingRow, TokenTerms], None] | None = None
        """Is told of each row that this rank trains on, as it does."""
        self._source = model_path
        self._failures = failures
        self._policy = self._load_policy()
        self._policy.train()
        if config.gradient_checkpointing:
            self._policy.model.gradient_checkpointing_enable({"use_reentrant": False})
        self._shared = (
            DistributedDataParallel(self._policy, gradient_as_bucket_view=True)
            if ranks.world_size > 1
            else None
        )
        self._reference = (
            self._load_policy().requires_grad_(False).eval() if config.kl_coef else None
        )
        self._optimizer = torch.optim.AdamW(
            self._policy.parameters(),
            lr=config.lr,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def step(self, rows: Sequence[TrainingRow], *, policy_version: int) -> StepReport:
        """Train on one batch, the same at every rank, with the learner's weights at `policy_version`."""
        started = time.perf_counter()
        _refuse_mixed_or_newer(rows, policy_version)
        advantages = row_advantages(rows, advantage=ADVANTAGES[self.config.advantage])
        kept = [
            index
            for index, row in enumerate(rows)
            if any(row.loss_mask) and not advantages.zero_variance[index]
        ]
        clock, sums, gradients, lr = _Clock(), _Sums(), list[Gradient](), self.lr
        with clock("pack"):
            minibatches = [
                self._microbatches(
                    [rows[i] for i in part], [advantages.values[i] for i in part], policy_version
                )
                for part in _minibatches(kept, self.config.minibatch_rows)
            ]
        if len(minibatches) > 1:
            with clock("old_logprobs"):
                self._recompute_old_logprobs(minibatches)
        for microbatches in minibatches:
            part = self._gradients(microbatches, clock)
            gradients.append(self._update(part.loss, rows, clock))
            sums.add(part)
        seconds = time.perf_counter() - started
        telemetry.STEP_SECONDS.observe(seconds)
        return StepReport.of(
            rows=rows,
            kept=len(kept),
            advantages=advantages,
            sums=asdict(sums),
            gradients=gradients,
            computed_with=arithmetic(self.ranks),
            lr=lr,
            step=self.steps,
            policy_version=policy_version,
            seconds=clock.seconds | {"total": seconds},
        )

    def close(self) -> None:
        """Let go of the other ranks; to be called while the process group still exists.

        What shares gradients holds the group too. Were it the last to hold it, it would wait for the group's thread while
        that thread waits for the GIL: the process would hang.
        """
        self._shared = None
        gc.collect()

    @property
    def lr(self) -> float:
        """The rate of the next optimizer step."""
        warmup = self.config.warmup_steps
        return self.config.lr * min(1.0, (self.steps + 1) / warmup if warmup else 1.0)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) in Hugging Face names, float32, tied weights once; they change with the next step."""
        for name, parameter in self._policy.model.named_parameters():
            yield name, parameter.detach()

    def export(self, path: Path, *, dtype: torch.dtype = torch.bfloat16) -> Path:
        """Write a folder that transformers and vLLM load, with the source model's tokenizer files.

        Rank 0 writes, without waiting for the others; elsewhere nothing happens.

        Raises:
            TrainingError: there is no room on the disk, or another reason why it can't be written.
        """
        if self.ranks.first:
            config = self._policy.model.config
            try:
                export_model(path, self.named_weights(), config, self._source, dtype)
            except (OSError, SafetensorError) as error:
                raise TrainingError(f"can't write the model to {path}: {error}") from error
        return path

    def save(
        self, folder: Path, *, policy_version: int, cursor: JsonValue = None, keep: int = 3
    ) -> Path | None:
        """Write a checkpoint into `folder` and return its path.

        Rank 0 does, without waiting for the others; elsewhere it is None and nothing happens.
        """
        path = None
        if self.ranks.first:
            checkpoint = Checkpoint(
                weights=dict(self.named_weights()),
                optimizer=self._optimizer.state_dict(),
                rng={"cpu": torch.get_rng_state()},
                state=CheckpointState(self.steps, policy_version, cursor),
            )
            path = save_checkpoint(folder, checkpoint, keep=keep)
        return path

    def load(self, path: Path) -> CheckpointState:
        """Go on exactly where the checkpoint `path` was saved; every rank loads it."""
        checkpoint = load_checkpoint(path)
        own = dict(self.named_weights())
        if {name: tensor.shape for name, tensor in own.items()} != {
            name: tensor.shape for name, tensor in checkpoint.weights.items()
        }:
            raise CheckpointError(f"{path} holds another model than {self._source}")
        for name, tensor in own.items():
            tensor.copy_(checkpoint.weights[name])
        self._optimizer.load_state_dict(checkpoint.optimizer)
        torch.set_rng_state(checkpoint.rng["cpu"])
        self.steps = checkpoint.state.step
        return checkpoint.state

    def _load_policy(self) -> PolicyModel:
        return PolicyModel(
            load_model(self._source),
            dtype=DTYPES[self.config.dtype],
            logits_chunk=self.config.logits_chunk,
        ).to(self.ranks.device)

    def _microbatches(
        self, rows: Sequence[TrainingRow], advantages: Sequence[float], policy_version: int
    ) -> list[_Microbatch]:
        """This rank's share of a minibatch, in packs; empty if there are fewer rows than ranks."""
        coefficients = AGGREGATIONS[self.config.aggregation](
            [sum(row.loss_mask) for row in rows],
            [row.weight for row in rows],
            [row.rollout_id for row in rows],
        )
        order = prefix_order([row.token_ids for row in rows])
        tokens = [rows[index].token_ids for index in order]
        shard = partition(tokens, self.ranks.world_size)[self.ranks.rank]
        own = [tokens[position] for position in shard]
        runs = partition(own, len(cut(own, self.config.microbatch_tokens)))
        return [
            self._microbatch(
                [rows[i] for i in picked],
                [advantages[i] for i in picked],
                [coefficients[i] for i in picked],
                policy_version,
            )
            for run in runs
            if (picked := [order[shard[position]] for position in run])
        ]

    def _microbatch(
        self,
        rows: Sequence[TrainingRow],
        advantages: Sequence[float],
        coefficients: Sequence[float],
        policy_version: int,
    ) -> _Microbatch:
        device = self.ranks.device
        packed = pack([row.token_ids for row in rows], [row.trained_positions for row in rows]).to(
            device
        )
        behavior = [row.behavior_logprobs[i] for row in rows for i in row.trained_positions]
        equal = torch.tensor([row.policy_version == policy_version for row in rows], device=device)
        return _Microbatch(
            rows=rows,
            pack=packed,
            advantages=torch.tensor(advantages, device=device)[packed.sequence],
            coefficients=torch.tensor(coefficients, device=device)[packed.sequence],
            behavior_logprobs=torch.tensor(behavior, device=device),
            equal_weights=equal[packed.sequence],
        )

    @torch.no_grad()
    def _recompute_old_logprobs(self, minibatches: Sequence[Sequence[_Microbatch]]) -> None:
        """Before the batch's first optimizer step; with only one step they equal its own logprobs."""
        for microbatches in minibatches:
            for microbatch in microbatches:
                microbatch.old_logprobs = self._policy(microbatch.pack)[0][microbatch.pack.unique]

    def _gradients(self, microbatches: Sequence[_Microbatch], clock: _Clock) -> _Sums:
        """Leave the minibatch's gradient in the parameters; sums over all ranks."""
        self._optimizer.zero_grad(set_to_none=self._shared is None)
        sums = _Sums()
        last = len(microbatches) - 1
        for index, microbatch in enumerate(microbatches):
            with self._local(unless=index == last):
                with clock("forward"):
                    loss, part = self._loss(microbatch)
                    sums.add(part)
                with clock("backward"):
                    (loss * self.ranks.world_size).backward()
        if not microbatches:
            with clock("backward"):
                self._train_nothing()
        with clock("reduce"):
            return sums.over(self.ranks)

    def _local(self, *, unless: bool) -> AbstractContextManager[None]:
        """Keep gradients on this rank: only the last microbatch sends them, accumulated, to the others."""
        if self._shared is None or unless:
            return nullcontext()
        return cast("AbstractContextManager[None]", self._shared.no_sync())

    def _train_nothing(self) -> None:
        """A backward pass with zero gradient: this rank's part in the all-reduce when its shard is empty."""
        nothing = pack([[0]], [[]]).to(self.ranks.device)
        logprobs, _ = (self._shared or self._policy)(nothing)
        logprobs.sum().backward()

    def _loss(self, microbatch: _Microbatch) -> tuple[Tensor, _Sums]:
        config, unique = self.config, microbatch.pack.unique
        unique_logprobs, unique_entropies = (self._shared or self._policy)(microbatch.pack)
        logprobs, entropies = unique_logprobs[unique], unique_entropies[unique]
        old = microbatch.old_logprobs if microbatch.old_logprobs is not None else logprobs.detach()
        behavior = microbatch.behavior_logprobs
        terms = LOSSES[config.loss](
            logprobs,
            old,
            microbatch.advantages,
            microbatch.pack.sequence,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip,
        )
        correction = (
            correction_weights.truncated(old, behavior, cap=config.correction_cap)
            if config.correction_cap is not None
            else torch.ones_like(old)
        )
        losses = terms.losses * correction
        if self._reference is not None:
            with torch.no_grad():
                reference = self._reference(microbatch.pack)[0][unique]
            kl = KL_ESTIMATORS[config.kl](logprobs, reference)
            losses = losses + config.kl_coef * kl
        else:
            kl = k3(logprobs.detach(), behavior)
        if config.entropy_coef:
            losses = losses - config.entropy_coef * entropies
        loss = (losses * microbatch.coefficients).sum()
        if self.watch is not None:
            terms_of_token = (logprobs, terms.ratio, correction, entropies, losses)
            for row, own in _by_row(microbatch, terms_of_token):
                self.watch(row, own)
        gap = (old - behavior).abs()[microbatch.equal_weights]
        return loss, _Sums(
            loss=loss.item(),
            tokens=len(old),
            clipped=terms.clipped.sum().item(),
            ratio=terms.ratio.sum().item(),
            correction=correction.sum().item(),
            kl=kl.sum().item(),
            entropy=entropies.sum().item(),
            gap=gap.sum().item(),
            gap_tokens=len(gap),
            packed_tokens=microbatch.pack.tokens,
        )

    def _update(self, loss: float, rows: Sequence[TrainingRow], clock: _Clock) -> Gradient:
        """One optimizer step. Every rank decides the same."""
        with clock("optimizer"):
            gradient = self._clip()
            norm = gradient.norm
            if not (math.isfinite(loss) and math.isfinite(norm)):
                found = f"loss={loss}, grad_norm={norm}; the weights were not changed"
                raise self._not_finite(found, rows)
            for group in self._optimizer.param_groups:
                group["lr"] = self.lr
            self._optimizer.step()
            if not math.isfinite(weight_norm := self._weight_norm()):
                found = f"loss={loss}, grad_norm={norm}, lr={self.lr}: the weights' norm became {weight_norm}"
                raise self._not_finite(f"{found}; they were neither published nor saved", rows)
            self.steps += 1
        return gradient

    def _clip(self) -> Gradient:
        """Clip the gradient; what it was before."""
        parameters = list(self._policy.parameters())
        zero = torch.zeros((), device=self.ranks.device)
        norms = torch.stack([zero if p.grad is None else p.grad.norm() for p in parameters])
        norm = norms.norm()
        torch.nn.utils.clip_grads_with_norm_(parameters, self.config.grad_clip, norm)
        return Gradient(norm.item(), tuple(norms.tolist()))

    def _weight_norm(self) -> float:
        """Summed over the ranks, so that all of them see the same."""
        with torch.no_grad():
            norm = torch.nn.utils.get_total_norm(list(self._policy.parameters()))
        return self.ranks.sum(norm.double()).item()

    def _not_finite(self, found: str, rows: Sequence[TrainingRow]) -> NonFiniteLossError:
        message = f"step {self.steps + 1}: {found}"
        if self._failures is not None:
            path = self._failures / f"step-{self.steps + 1:08d}"
            if self.ranks.first:
                path.mkdir(parents=True, exist_ok=True)
                (path / "rows.jsonl").write_bytes(encode_rows(rows))
                reason = {"reason": message, "config": self.config.model_dump(mode="json")}
                (path / "reason.json").write_text(json.dumps(reason, indent=2))
            message += f"; the batch is in {path}"
        return NonFiniteLossError(message)


def _by_row(
    microbatch: _Microbatch, terms: Sequence[Tensor]
) -> Iterator[tuple[TrainingRow, TokenTerms]]:
    """[N] terms, in the order of `TokenTerms`, cut at the rows."""
    columns = [*terms, microbatch.coefficients]
    values = torch.stack([column.detach().double() for column in columns]).cpu()
    for number, row in enumerate(microbatch.rows):
        *own, coefficients = values[:, microbatch.pack.sequence.cpu() == number].tolist()
        yield row, TokenTerms(*(tuple(term) for term in own), coefficient=coefficients[0])


def _minibatches(kept: Sequence[int], size: int | None) -> list[Sequence[int]]:
    if not kept:
        return []
    return [
        kept[start : start + (size or len(kept))]
        for start in range(0, len(kept), size or len(kept))
    ]


def _refuse_mixed_or_newer(rows: Sequence[TrainingRow], policy_version: int) -> None:
    policies = sorted({row.policy for row in rows})
    if len(policies) > 1:
        raise TrainingError(
            f"rows of several policies in one batch: {policies}; each has its own learner"
        )
    for row in rows:
        if row.policy_version > policy_version:
            raise TrainingError(
                f"row of rollout {row.rollout_id!r} has policy_version={row.policy_version}, newer than "
                f"the learner's {policy_version}"
            )
