"""What can be trained: an environment, and the agents that work in it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import cast

from aworld_runtime.environments.base import Environment, Split
from aworld_runtime.errors import UnknownProgramError, UnknownTaskError
from aworld_runtime.messages import Data, Task
from aworld_runtime.nodes.environment import load_environment
from aworld_runtime.nodes.node import load


class TrainingTask(Data):
    """Names code by `module:attribute`, so that any worker can load it."""

    name: str
    environment: str
    program: str
    """An agent, a swarm, or a function that returns one."""
    roles: tuple[str, ...]
    """Agents that learn; the others are frozen."""
    max_tokens: int = 64
    """Sampled tokens per turn, at most."""


TASKS = {
    "calculator": TrainingTask(
        name="calculator",
        environment="aworld_runtime.training.calculator:CalculatorEnvironment",
        program="aworld_runtime.training.calculator:build",
        roles=("solver",),
        max_tokens=48,
    ),
}


def find_task(name: str) -> TrainingTask:
    """The built-in task `name`, or the `TrainingTask` at `module:attribute`.

    Raises:
        UnknownTaskError: neither; lists the known ones.
    """
    if name in TASKS:
        return TASKS[name]
    known = f"known tasks: {', '.join(sorted(TASKS))}; or module:attribute of a TrainingTask of your own"
    if ":" not in name:
        raise UnknownTaskError(f"task={name!r}: no such task; {known}")
    try:
        found = load(name)
    except UnknownProgramError as error:
        raise UnknownTaskError(f"task={name!r}: {error}; {known}") from error
    if not isinstance(found, TrainingTask):
        raise UnknownTaskError(
            f"task={name!r} is a {type(found).__name__}, not a TrainingTask; {known}"
        )
    return found


def environment_of(training: TrainingTask) -> Environment:
    """Its environment, if it has what an environment must have.

    Raises:
        UnknownProgramError: it can't be imported or made, or has no `tasks` or no asynchronous `score`.
    """
    reference = training.environment
    environment = load_environment(reference)
    if not callable(getattr(environment, "tasks", None)):
        raise UnknownProgramError(
            f"environment {reference!r} has no tasks(split, *, count, seed) that returns Tasks"
        )
    if not inspect.iscoroutinefunction(inspect.unwrap(environment.score)):
        raise UnknownProgramError(
            f"environment {reference!r}: score must be async and return a Reward"
        )
    return environment


def tasks_of(
    training: TrainingTask, environment: Environment, split: Split, *, count: int, seed: int
) -> list[Task]:
    """Tasks of its environment, scored by it where they name no other.

    Raises:
        UnknownProgramError: the environment fails, or gives none, or something else.
    """
    reference = training.environment
    try:
        tasks = cast("Sequence[object]", environment.tasks(split, count=count, seed=seed))
    except Exception as error:  # the boundary: user code
        raise UnknownProgramError(
            f"environment {reference!r}: tasks({split!r}, count={count}, seed={seed}) failed with"
            f" {type(error).__name__}: {error}"
        ) from error
    found = [task for task in tasks if isinstance(task, Task)]
    if not found or len(found) < len(tasks):
        raise UnknownProgramError(
            f"environment {reference!r}: tasks({split!r}, count={count}, seed={seed}) must return Tasks, and some"
        )
    return [
        task.model_copy(update={"environment": task.environment or reference}) for task in found
    ]
