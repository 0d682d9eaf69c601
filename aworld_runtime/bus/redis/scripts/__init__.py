"""Every change of more than one key, as a typed function over one Lua script.

In each, the first command that needs memory comes before any change: a full server refuses it as a
whole, while reading and acknowledging go on. Work is settled, renewed and given back only by who
holds it; the server's clock decides what is due. Scripts marked `merges` take many calls at once.
"""

from aworld_runtime.bus.redis.scripts import logs, nodes, queues

SCRIPTS = (*logs.SCRIPTS, *queues.SCRIPTS, *nodes.SCRIPTS)
"""Loaded on every new connection."""
