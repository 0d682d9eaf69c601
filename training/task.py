"""What can be trained: an environment, and the agents that work in it."""

from __future__ import annotations

from aworld_runtime.errors import UnknownProgramError, UnknownTaskError
from aworld_runtime.messages import Data
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
