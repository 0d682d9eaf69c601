"""A task that costs nothing, for tests of the trainer: a scripted policy that knows every third answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from aworld_runtime.agents import Agent
from aworld_runtime.environments.base import Reward, Split
from aworld_runtime.errors import ModelRejectedError
from aworld_runtime.messages import Completion, Task, VersionSpan
from aworld_runtime.models.base import ModelRequest
from aworld_runtime.models.scripted import ScriptedModel
from aworld_runtime.training.rows import TrainingRow
from aworld_runtime.training.task import TrainingTask
from aworld_runtime.trajectory import Episode

SERVED = [0]
"""The version that the scripted policy samples with."""
FAILING: set[str] = set()
"""Prompts whose next episode fails, once each."""
UNSCORABLE: set[str] = set()
"""Splits whose episodes can't be scored."""


class CountingEnvironment:
    """Right is the answer "yes"."""

    def tasks(self, split: Split, *, count: int, seed: int = 0) -> Sequence[Task]:  # noqa: ARG002
        return [Task(id=f"{split}-{i}", prompt=f"{split} {i}") for i in range(count)]

    async def score(self, task: Task, episode: Episode) -> Reward:
        if task.id.partition("-")[0] in UNSCORABLE:
            raise RuntimeError("planted: no judge")
        return Reward(
            total=float(episode.answer == "yes"),
            breakdown={"right": float(episode.answer == "yes")},
        )


class BareEnvironment(CountingEnvironment):
    """Its verdict is a number, and no `Reward`."""

    async def score(self, task: Task, episode: Episode) -> Reward:  # noqa: ARG002
        return 1.0  # pyright: ignore[reportReturnType]


class GarbledEnvironment(CountingEnvironment):
    """Its prompts are no text that can be written down."""

    def tasks(self, split: Split, *, count: int, seed: int = 0) -> Sequence[Task]:
        return [
            task.model_copy(update={"prompt": "half a \ud800 pair"})
            for task in super().tasks(split, count=count, seed=seed)
        ]


def reply(request: ModelRequest) -> Completion:
    prompt = request.messages[-1].content
    if prompt in FAILING:
        FAILING.discard(prompt)
        raise ModelRejectedError("planted failure")
    sampled = (request.seed or 0) % 3
    return Completion(
        text="yes" if sampled == 0 else "no",
        prompt_token_ids=(1, 2, 3),
        token_ids=(10 + sampled,),
        behavior_logprobs=(-1.0,),
        policy="policy",
        version_spans=(VersionSpan(version=SERVED[0], start=0, end=1),),
    )


def build() -> Agent:
    return Agent("solver", llm=ScriptedModel(reply))


CASE = TrainingTask(
    name="case",
    environment="tests.training.trainer_case:CountingEnvironment",
    program="tests.training.trainer_case:build",
    roles=("solver",),
)
BARE = CASE.model_copy(update={"environment": "tests.training.trainer_case:BareEnvironment"})
GARBLED = CASE.model_copy(update={"environment": "tests.training.trainer_case:GarbledEnvironment"})


@dataclass(frozen=True)
class Report:
    """A step that computed nothing but metrics."""

    metrics: dict[str, float]
    advantages: tuple[float, ...] = ()
    gradient_norms: tuple[float, ...] = ()
    computed_with: Mapping[str, str] = field(default_factory=dict[str, str])


class RecordingLearner:
    """A learner whose weights are the list of batches it has seen."""

    def __init__(self, folder: Path) -> None:
        self.seen: list[tuple[str, ...]] = []
        self.staleness: list[int] = []
        self.folder = folder

    def step(self, rows: Sequence[TrainingRow], *, policy_version: int) -> Report:
        self.staleness += [policy_version - row.policy_version for row in rows]
        self.seen.append(tuple(sorted(row.rollout_id for row in rows)))
        return Report({"actor/loss": float(policy_version)})

    def save(self, policy_version: int) -> Path:
        path = self.folder / f"checkpoint-{policy_version}"
        path.write_text("\n".join(" ".join(batch) for batch in self.seen))
        return path

    def load(self, path: Path) -> int:
        self.seen = [tuple(line.split()) for line in path.read_text().splitlines()]
        return int(path.name.rpartition("-")[2])

    def export(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)


class RecordingPublisher:
    """A sampler that takes every version at once."""

    async def publish(self, version: int) -> Sequence[str]:
        SERVED[0] = version
        return ["here"]

    async def wait_until_ready(self) -> None:
        pass

    async def versions(self) -> Sequence[int]:
        return [SERVED[0]]
