"""Programs and tools for worker processes that tests kill. They leave a file for each time they begin, and wait for one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from aworld_runtime import tool
from aworld_runtime.events import EpisodeFinished, EpisodeRequested, Event, new_id
from aworld_runtime.messages import Task
from aworld_runtime.nodes.context import Context
from aworld_runtime.nodes.node import Program
from aworld_runtime.tools import call_id
from tests.waiting import wait_until

OPEN = "open"
"""The file that all wait for."""


@dataclass(frozen=True)
class Handler:
    """Its handler waits in peace, holds the event loop, or ends its process. The task is to do so in a folder."""

    deed: Literal["waits", "blocks", "exits"]
    role: str = "handler"
    subscriptions: tuple[str, ...] = ("episode.requested",)

    async def handle(self, ctx: Context, event: Event) -> None:  # noqa: ARG002 - Node's signature
        place = Path(ctx.task.prompt)
        if not (place / OPEN).exists():
            (place / f"begun-{os.getpid()}").touch()
            if self.deed == "exits":
                os._exit(17)
        while self.deed == "blocks" and not (place / OPEN).exists():
            pass
        await opened(place)
        ctx.emit(EpisodeFinished(answer="through"))

    def program(self) -> Program:
        return Program(nodes=(self,))


waits, blocks, exits = Handler("waits"), Handler("blocks"), Handler("exits")


async def opened(place: Path) -> None:
    """Wait for the file."""
    await wait_until((place / OPEN).exists, 60, "a test that lets it go on")


def requested(deed: str, place: Path, *, group: str | None = None) -> Event:
    """An episode of one of them."""
    return Event.of(
        EpisodeRequested(task=Task(id="t", prompt=str(place)), program=f"tests.deadly:{deed}"),
        source="test/1",
        episode_id=new_id(),
        group_id=group,
    )


@tool
async def order(place: str) -> str:
    """Does something that must be done once: leaves a file named by the call and the process."""
    (Path(place) / f"{call_id()}-by-{os.getpid()}").touch()
    await opened(Path(place))
    return "ordered"


tools = [order]
