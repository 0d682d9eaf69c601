"""What logs and queues are called on the bus and in the store."""

from __future__ import annotations

EPISODES_QUEUE = "episodes"
"""Where `episode.requested` waits for a worker."""

_EPISODE = "episode:"
_RUN = "run:"
_TOOL = "tool:"


def episode_log(episode_id: str) -> str:
    return f"{_EPISODE}{episode_id}"


def run_log(run_id: str) -> str:
    return f"{_RUN}{run_id}"


def episode_of_log(log: str) -> str | None:
    """The episode that the log belongs to; None for another kind of log."""
    return log.removeprefix(_EPISODE) if log.startswith(_EPISODE) else None


def run_of_log(log: str) -> str | None:
    """The run that the log belongs to; None for another kind of log."""
    return log.removeprefix(_RUN) if log.startswith(_RUN) else None


def tool_queue(name: str) -> str:
    """Where calls of the tool `name` wait for a tool worker."""
    return f"{_TOOL}{name}"


def tool_of_queue(queue: str) -> str | None:
    """The tool whose calls the queue holds; None for another kind of queue."""
    return queue.removeprefix(_TOOL) if queue.startswith(_TOOL) else None
