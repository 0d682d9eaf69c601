"""Agents: they take turns with a model and call tools."""

from aworld_runtime.agents.agent import Agent, AgentConfig
from aworld_runtime.agents.runners import Runners

__all__ = ["Agent", "AgentConfig", "Runners"]
