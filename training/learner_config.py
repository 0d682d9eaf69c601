"""The learner's settings, apart from the learner so that reading them loads no torch."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from aworld_runtime.training.algorithms import AdvantageName, AggregationName, KLName, LossName

Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, lt=1)]


class LearnerConfig(BaseModel):
    """Defaults: GRPO with clip-higher, token mean over the global count, one optimizer step a batch."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    advantage: AdvantageName = "grpo"
    """Baseline and scale of a group's rewards."""
    loss: LossName = "clipped"
    """The surrogate of each trained token."""
    aggregation: AggregationName = "token_mean"
    """What one token counts in the batch's loss."""
    clip_low: Positive = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: Positive = 0.28
    """The ratio is clipped above at 1 + clip_high (DAPO's clip-higher)."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound on the loss of a token with a negative advantage; None for none. verl's default of 3 changes the loss."""
    correction_cap: Positive | None = 2.0
    """Cap of the detached weight exp(old_logprobs - behavior_logprobs); None trains without the correction."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL to the reference policy, which is the model as it was loaded; 0 keeps no reference in memory."""
    kl: KLName = "k3"
    """Estimator of that KL."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of an entropy bonus; a tiny random model collapses without one."""

    lr: Positive = 2e-5
    """Constant after the warmup. The default suits full fine-tuning at 100M parameters; at billions, 1e-6."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps over which the rate rises linearly to `lr`."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """Of AdamW."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Of AdamW."""
    grad_clip: Positive = 1.0
    """Largest norm of the whole gradient."""
    minibatch_rows: Annotated[int, Field(ge=1)] | None = None
    """Rows of an optimizer step; None takes one step a batch, which is exactly on policy when the batch is fresh."""

    microbatch_tokens: Annotated[int, Field(ge=1)] = 1024
    """Packed tokens of a forward pass, shared prefixes counted once; memory grows with it, about 1.7 MB a token at 135M
    parameters in bfloat16. A longer row stands alone."""
    logits_chunk: Annotated[int, Field(ge=1)] = 512
    """Tokens whose logits are held at once; memory is a few times logits_chunk * vocabulary * 4 bytes."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass: about a third more time for much less memory."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the matrix products; master weights, gradients and optimizer are float32 either way."""
    threads: Annotated[int, Field(ge=1)] | None = None
    """CPU threads of this rank; None leaves torch's default. On a busy machine 2 can be slower than 1."""
    seed: int = 0
    """Of torch; today's learner draws nothing, models with their own randomness do."""

    @model_validator(mode="after")
    def _known_combinations(self) -> Self:
        if self.dual_clip is not None and self.loss not in ("clipped", "gspo"):
            raise ValueError(f"dual_clip has no part in loss={self.loss!r}; leave it out")
        return self
