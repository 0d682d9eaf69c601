"""An event-driven runtime for agents and swarms whose every run is a log, and that learn from it.

The names below load on first use, so importing this package costs next to nothing and pulls in no
server's or model's package.
"""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aworld_runtime.agents.agent import Agent, AgentConfig
    from aworld_runtime.agents.runners import Runners
    from aworld_runtime.models.client import LLMClient
    from aworld_runtime.models.scripted import ScriptedModel
    from aworld_runtime.replay.debugger import Debugger
    from aworld_runtime.runtime import Runtime
    from aworld_runtime.swarms.swarm import MultiAgentGroup, Swarm
    from aworld_runtime.tools.base import BaseTool
    from aworld_runtime.tools.function import tool
    from aworld_runtime.training.train import train

__version__ = "0.1.0"

_EXPORTS = {
    "Agent": "aworld_runtime.agents.agent:Agent",
    "AgentConfig": "aworld_runtime.agents.agent:AgentConfig",
    "BaseTool": "aworld_runtime.tools.base:BaseTool",
    "Debugger": "aworld_runtime.replay.debugger:Debugger",
    "LLMClient": "aworld_runtime.models.client:LLMClient",
    "MultiAgentGroup": "aworld_runtime.swarms.swarm:MultiAgentGroup",
    "Runners": "aworld_runtime.agents.runners:Runners",
    "Runtime": "aworld_runtime.runtime:Runtime",
    "ScriptedModel": "aworld_runtime.models.scripted:ScriptedModel",
    "Swarm": "aworld_runtime.swarms.swarm:Swarm",
    "tool": "aworld_runtime.tools.function:tool",
    "train": "aworld_runtime.training.train:train",
}

__all__ = [
    "Agent",
    "AgentConfig",
    "BaseTool",
    "Debugger",
    "LLMClient",
    "MultiAgentGroup",
    "Runners",
    "Runtime",
    "ScriptedModel",
    "Swarm",
    "__version__",
    "tool",
    "train",
]

# In a checkout agents/, swarms/ and training/ stand beside this package; a wheel has them inside it.
_here = Path(__file__).parent
if not (_here / "agents").is_dir():
    __path__.append(str(_here.parent))


def __getattr__(name: str) -> Any:
    """Import an exported name on first use."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _EXPORTS[name].split(":")
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The lazy names too."""
    return sorted({*globals(), *__all__})
