"""Tools by name: the built-in ones, and how an agent's `tools=[...]` becomes tools."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

from aworld_runtime.errors import ToolError, UnknownToolError
from aworld_runtime.tools.base import BaseTool

BUILT_IN = {
    "calculator": "aworld_runtime.tools.calculator:Calculator",
}
"""Name → `module:attribute` of a `BaseTool` class without arguments."""

AnyTool = BaseTool | type[BaseTool] | str | Callable[..., Any]
"""A tool, a tool class, the name of a built-in one, or a typed function."""


def resolve(tools: Sequence[AnyTool]) -> dict[str, BaseTool]:
    """The tools by the name that a model calls them by, in the given order.

    Raises:
        UnknownToolError: no built-in tool has this name.
        ToolError: two tools share a name, or one is no tool.
    """
    resolved: dict[str, BaseTool] = {}
    for given in tools:
        tool = _resolve_one(given)
        name = tool.get_schema().name
        if name in resolved:
            raise ToolError(f"two tools are called {name!r}: rename one, @tool(name=...)")
        resolved[name] = tool
    return resolved


def _resolve_one(given: AnyTool) -> BaseTool:
    if isinstance(given, BaseTool):
        return given
    if isinstance(given, str):
        return _built_in(given)
    if isinstance(given, type) and issubclass(given, BaseTool):
        return given()
    other = cast("object", given)
    if not inspect.isroutine(other):
        raise ToolError(
            f"a {type(other).__name__} is no tool: expected a typed function, a BaseTool or a built-in one's name"
        )
    from aworld_runtime.tools.function import tool

    return tool(cast("Callable[..., Any]", given))


def _built_in(name: str) -> BaseTool:
    if name not in BUILT_IN:
        known = ", ".join(sorted(BUILT_IN))
        raise UnknownToolError(
            f"unknown tool {name!r}; known: {known}. A tool of your own is given itself, not by its name"
        )
    module, attribute = BUILT_IN[name].split(":")
    return getattr(importlib.import_module(module), attribute)()
