"""Tools: a schema, and a function of JSON arguments.

Subclass `BaseTool` and write `run` and `get_schema`, or decorate a typed function with `@tool`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from pydantic import JsonValue

from aworld_runtime.errors import ToolError
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


class RemoteTool(BaseTool):
    """A tool that runs elsewhere on the bus: only its schema is known here; calls go to its queue."""

    def __init__(self, schema: ToolSpec, *, timeout_s: float = 60.0) -> None:
        self._schema = schema
        self.timeout_s = timeout_s

    def get_schema(self) -> ToolSpec:
        return self._schema

    async def run(self, **arguments: JsonValue) -> JsonValue:  # noqa: ARG002 - BaseTool's signature
        raise ToolError(f"{self._schema.name} runs elsewhere: its calls go through the bus")
