"""Everything a training run can be told, with its defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, JsonValue

from aworld_runtime.messages import Data
from aworld_runtime.processes import HOST
from aworld_runtime.training.learner_config import LearnerConfig
from aworld_runtime.urls import shown


class TrainConfig(Data):
    """One training run. A config file has these keys; so has the command line, as `key=value`."""

    task: str = "calculator"
    """A built-in task, or `module:attribute` of a `TrainingTask`."""
    program: str | None = None
    """`module:attribute` of the agent or swarm to train instead of the task's own."""
    model: str = "smollm2"
    """`smollm2`, or a folder with a Hugging Face model."""
    policy: str = "policy"
    """What the trained model is called in logs and by the sampler."""
    steps: int = Field(default=20, ge=1)
    """Optimizer steps."""
    seed: int = 0
    train_tasks: int = Field(default=512, ge=1)
    """Tasks to draw from; they repeat when used up."""
    groups_per_step: int = Field(default=4, ge=1)
    """Tasks per batch."""
    group_size: int = Field(default=8, ge=2)
    """Episodes per task."""
    max_staleness: int = Field(default=0, ge=0)
    """Versions that a sample may be older than the learner; 0 is synchronous."""
    attempts: int = Field(default=3, ge=1)
    """Tries of an episode that fails for reasons that are not the policy's, the first one included."""
    episode_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds that an episode may run; its wait for a worker and the time in which a run is interrupted don't count."""
    stall_timeout_s: float = Field(default=900.0, gt=0)
    """Seconds without news in the run's log after which the run stops with an error; after half of them it queues
    unfinished episodes again.
    """
    evaluate_every: int = Field(default=5, ge=1)
    """Steps between evaluations on held-out tasks; there is one before the first step and one after the last."""
    evaluate_tasks: int = Field(default=32, ge=1)
    checkpoint_every: int = Field(default=5, ge=1)
    keep_checkpoints: int = Field(default=2, ge=1)
    worker_num: int = Field(default=4, ge=1)
    """Worker processes."""
    slots: int = Field(default=8, ge=1)
    """Episodes at once per worker."""
    learner_ranks: int = Field(default=1, ge=1)
    """Processes that hold gradients."""
    sampler: Literal["auto", "vllm", "transformers"] = "auto"
    sampler_host: str = HOST
    """This machine's address for the sampler; workers on other machines need one that they can reach."""
    sampler_port: int = Field(default=0, ge=0, lt=65536)
    """0 takes a free one."""
    sampler_max_len: int = Field(default=1024, ge=64)
    """Tokens of prompt and completion together."""
    sampler_threads: int | None = Field(default=None, ge=1)
    """Cores it computes on; none is all."""
    learner: LearnerConfig = LearnerConfig()
    bus: str | None = None
    """URL of a server; none starts a private one."""
    bus_port: int = Field(default=0, ge=0, lt=65536)
    """Port of the private server; 0 takes a free one."""
    store: str | None = None
    """URL; none is SQLite in ./.aworld."""
    health_host: str = HOST
    health_port: int = Field(default=0, ge=0, lt=65536)
    """Port at which the launcher answers GET /healthz and /metrics, and the learner's ranks at those after it; 0: none."""
    external_workers: bool = False
    """Start no workers: others join by `aworld worker --bus …`. `worker_num` x `slots` still says how many
    completions the sampler makes at once."""
    out: Path | None = None
    """The run's folder; none is runs/RUN."""

    def shown(self) -> dict[str, JsonValue]:
        """As it may be kept in logs and passed on: servers without their passwords."""
        values = self.model_dump(mode="json")
        return values | {key: shown(url) for key in ("bus", "store") if (url := values[key])}
