"""A task that any model can be bad at and better at: say much with vowels. For whole runs with a tiny random model."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from aworld_runtime.agents import Agent
from aworld_runtime.environments.base import Reward, Split
from aworld_runtime.messages import Task
from aworld_runtime.training.task import TrainingTask
from aworld_runtime.trajectory import Episode

TASK = "tests.e2e.vowels:VOWELS"


class VowelsEnvironment:
    """The share of vowels among the letters of the answer: no two random answers have the same."""

    def tasks(self, split: Split, *, count: int, seed: int = 0) -> Sequence[Task]:
        return [
            Task(
                id=f"vowels:{split}:{seed}:{number}",
                prompt=f"Say the {number}th thing for {split}.",
            )
            for number in range(count)
        ]

    async def score(self, task: Task, episode: Episode) -> Reward:  # noqa: ARG002
        letters = [letter for letter in episode.answer.lower() if letter.isalpha()]
        vowels = sum(letter in "aeiou" for letter in letters)
        return Reward(total=vowels / max(1, len(letters)))


class BrokenEnvironment(VowelsEnvironment):
    """Can't score anything."""

    async def score(self, task: Task, episode: Episode) -> Reward:  # noqa: ARG002
        raise RuntimeError("no judge")


class ElsewhereEnvironment(VowelsEnvironment):
    """Can't be made in the learner's process."""

    def __init__(self) -> None:
        if sys.argv[0].endswith("rank.py"):
            raise OSError("no judge in this place")


def build() -> Agent:
    return Agent("solver", tools=["calculator"], max_turns=2)


VOWELS = TrainingTask(
    name="vowels",
    environment="tests.e2e.vowels:VowelsEnvironment",
    program="tests.e2e.vowels:build",
    roles=("solver",),
    max_tokens=48,
)
BROKEN = VOWELS.model_copy(update={"environment": "tests.e2e.vowels:BrokenEnvironment"})
ELSEWHERE = VOWELS.model_copy(update={"environment": "tests.e2e.vowels:ElsewhereEnvironment"})
NOWHERE = VOWELS.model_copy(update={"environment": "tests.e2e.vowels:Nowhere"})
MISCAST = VOWELS.model_copy(update={"roles": ("solver", "critic")})
