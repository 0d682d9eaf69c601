"""How a node says that it is here, and how others learn who comes and goes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import suppress
from functools import partial

import anyio

from aworld_runtime.bus.base import ANNOUNCE_EVERY_S, LEAVE_S, Bus, NodeInfo
from aworld_runtime.bus.room import when_there_is_room
from aworld_runtime.errors import BusFullError
from aworld_runtime.events import NodeJoined, NodeLeft


async def announce(
    bus: Bus, nodes: Callable[[], Iterable[NodeInfo]], *, who: str, ttl_s: float = 5.0
) -> None:
    """Say every second which nodes are here and how they are; once cancelled, that they are gone.

    They are believed for `ttl_s` after their last word.
    """
    said: set[str] = set()
    try:
        while True:
            for node in nodes():
                said.add(node.name)
                await when_there_is_room(partial(bus.announce, node, ttl_s=ttl_s), who=who)
            await anyio.sleep(ANNOUNCE_EVERY_S)
    finally:
        with anyio.move_on_after(LEAVE_S, shield=True):
            for name in said:
                # Who can't say so is forgotten a few seconds later.
                with suppress(BusFullError):
                    await bus.withdraw(name)


async def arrivals(bus: Bus, kind: str) -> AsyncGenerator[NodeJoined | NodeLeft]:
    """Nodes of a kind as they come and go, those first that are here; never ends by itself."""
    known: set[str] = set()
    while True:
        here = {node.name for node in await bus.nodes() if node.kind == kind}
        for name in sorted(here - known):
            yield NodeJoined(node=name, kind=kind)
        for name in sorted(known - here):
            yield NodeLeft(node=name, reason="it left, or has not been heard of")
        known = here
        await anyio.sleep(ANNOUNCE_EVERY_S)
