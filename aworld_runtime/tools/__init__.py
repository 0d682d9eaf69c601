"""Tools: what agents may call. The names load on first use."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aworld_runtime.tools.base import BaseTool, RemoteTool
    from aworld_runtime.tools.calculator import Calculator
    from aworld_runtime.tools.call import call_id
    from aworld_runtime.tools.function import FunctionTool, tool
    from aworld_runtime.tools.registry import resolve

__all__ = ["BaseTool", "Calculator", "FunctionTool", "RemoteTool", "call_id", "resolve", "tool"]

_MODULES = {
    "BaseTool": "base",
    "Calculator": "calculator",
    "FunctionTool": "function",
    "RemoteTool": "base",
    "call_id": "call",
    "resolve": "registry",
    "tool": "function",
}


def __getattr__(name: str) -> Any:
    """Import an exported name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
