"""Environments: where tasks come from and who judges the answers.

An environment is named `module:attribute` (a class without arguments, or an instance), so that any worker can load it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from aworld_runtime.messages import Data, Task
from aworld_runtime.trajectory import Episode

Split = Literal["train", "test"]


class Reward(Data):
    """A verdict. `total` is what training uses; `breakdown` its named, weighted parts."""

    total: float
    breakdown: dict[str, float] = {}


class Environment(Protocol):
    """Tasks, and a score for what an agent did with one."""

    def tasks(self, split: Split, *, count: int, seed: int = 0) -> Sequence[Task]:
        """`count` tasks; the same for the same seed, none shared between splits."""
        ...

    async def score(self, task: Task, episode: Episode) -> Reward:
        """Judge a finished episode by its trajectories and answer."""
        ...
