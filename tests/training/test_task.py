"""A task of one's own: what of it is checked, and what is filled in."""

from __future__ import annotations

import functools
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from aworld_runtime.environments.base import Reward, Split
from aworld_runtime.errors import UnknownProgramError
from aworld_runtime.messages import Task
from aworld_runtime.training.task import TrainingTask, environment_of, tasks_of
from aworld_runtime.trajectory import Episode

HERE = "tests.training.test_task"


class Given:
    """Gives the tasks that it was made with."""

    def __init__(self, *tasks: Task) -> None:
        self.given = tasks

    def tasks(self, split: Split, *, count: int, seed: int = 0) -> Sequence[Task]:  # noqa: ARG002
        return self.given

    async def score(self, task: Task, episode: Episode) -> Reward:  # noqa: ARG002
        return Reward(total=1.0)


class Late(Given):
    """Its score is not asynchronous."""

    def score(self, task: Task, episode: Episode) -> float:  # noqa: ARG002  # pyright: ignore[reportIncompatibleMethodOverride]
        return 1.0


class Wrapped(Given):
    """Its score is asynchronous under a decorator that isn't."""

    @functools.wraps(Given.score)
    def score(self, task: Task, episode: Episode) -> Coroutine[Any, Any, Reward]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().score(task, episode)


class Taskless:
    async def score(self, task: Task, episode: Episode) -> Reward:  # noqa: ARG002
        return Reward(total=1.0)


class Crashing(Given):
    def tasks(self, split: Split, *, count: int, seed: int = 0) -> Sequence[Task]:  # noqa: ARG002
        raise OSError("no questions")


def training(environment: str) -> TrainingTask:
    return TrainingTask(
        name="t", environment=f"{HERE}:{environment}", program=f"{HERE}:build", roles=("solver",)
    )


def drawn(environment: Given) -> list[Task]:
    return tasks_of(training("Given"), environment, "train", count=2, seed=0)


def test_a_task_is_scored_by_its_training_tasks_environment_unless_it_names_another() -> None:
    tasks = drawn(Given(Task(id="a", prompt="?"), Task(id="b", prompt="?", environment="m:Other")))
    assert [task.environment for task in tasks] == [f"{HERE}:Given", "m:Other"]


@pytest.mark.parametrize(
    "environment, message",
    [
        (Given(), "must return Tasks, and some"),
        (Given("2 + 2?"), "must return Tasks, and some"),  # pyright: ignore[reportArgumentType]
        (Crashing(), "failed with OSError: no questions"),
    ],
)
def test_an_environment_without_tasks_is_refused(environment: Given, message: str) -> None:
    with pytest.raises(UnknownProgramError, match=message):
        drawn(environment)


@pytest.mark.parametrize(
    "environment, message",
    [
        ("Late", "score must be async and return a Reward"),
        ("Taskless", "has no tasks"),
        ("Nowhere", "has no attribute 'Nowhere'"),
    ],
)
def test_an_environment_that_lacks_something_is_refused(environment: str, message: str) -> None:
    with pytest.raises(UnknownProgramError, match=message):
        environment_of(training(environment))


@pytest.mark.parametrize("environment", ["Given", "Wrapped"])
def test_an_environment_with_all_it_needs_is_taken(environment: str) -> None:
    assert environment_of(training(environment)).tasks("train", count=1) == ()
