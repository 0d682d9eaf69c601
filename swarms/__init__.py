"""Swarms: agents that solve one task together, and the rules of who gets which event next."""

from aworld_runtime.swarms.swarm import MultiAgentGroup, Swarm

__all__ = ["MultiAgentGroup", "Swarm"]
