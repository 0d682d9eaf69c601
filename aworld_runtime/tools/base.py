"""Tools: a schema, and a function of JSON arguments.

Subclass `BaseTool` and write `run` and `get_schema`, or decorate a typed function with `@tool`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from pydantic import JsonValue

from aworld_runtime.messages import ToolSpec


class BaseTool(ABC):
    """One tool. Implement `run` and `get_schema`, nothing else."""

    timeout_s: float = 60.0
    """A call that takes longer fails with `ToolTimeoutError`."""

    @abstractmethod
    def get_schema(self) -> ToolSpec:
        """Name, description and JSON schema of the arguments."""

    @abstractmethod
    async def run(self, **arguments: JsonValue) -> JsonValue:
        """Do it. Raise `ToolError` (or anything else) to tell the agent what went wrong."""
