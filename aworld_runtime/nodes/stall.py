"""Saying so when an event loop stands still: code of an agent holds it, and nobody in the process can do anything else.

Its leases are renewed all the same, for slow work is not stolen: nobody takes its episodes over. So it must be told.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback

import anyio

logger = logging.getLogger(__name__)

LOOK_S = 1.0
LOOKS = 5
"""So many in which the loop has not moved. Counted, for a process that was stopped has not looked."""


async def tell_of_stalls(who: str) -> None:
    """Until cancelled, have a thread look whether this event loop moves, and warn where it doesn't, with what holds it."""
    moved, ended = threading.Event(), threading.Event()
    arguments = (who, threading.get_ident(), moved, ended)
    threading.Thread(target=_look, args=arguments, name="aworld-stalls", daemon=True).start()
    try:
        while True:
            moved.set()
            await anyio.sleep(LOOK_S / 2)
    finally:
        ended.set()


def _look(who: str, loop: int, moved: threading.Event, ended: threading.Event) -> None:
    missed = 0
    while not ended.wait(LOOK_S):
        if moved.is_set():
            moved.clear()
            missed = 0
            continue
        missed += 1
        if missed == LOOKS:
            logger.warning(
                "%s: the event loop has stood still for %.0f s, and all episodes here with it; it is held by:\n%s",
                who,
                LOOKS * LOOK_S,
                _stack(loop),
            )


def _stack(thread: int) -> str:
    # Python's documented way to another thread's stack.
    frames = sys._current_frames()  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    frame = frames.get(thread)
    return "".join(traceback.format_stack(frame)) if frame else "(the thread has ended)"
