"""Code that runs offline: what it tries to reach outside is refused, and told.

    with offline() as tried: …  ──▶ sys.audit("socket.connect", …) ──▶ LiveCallError, which is kept in `tried`

A context variable says who is offline: the code inside, its tasks and its threads, and nobody else in the process.
"""

from __future__ import annotations

import asyncio
import os
import sys
import sysconfig
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import cache, partial
from traceback import walk_stack
from typing import Any

from aworld_runtime.errors import LiveCallError

AUDITED: Mapping[str, int] = {
    "socket.connect": 1,
    "socket.sendto": 1,
    "socket.sendmsg": 1,
    "socket.getaddrinfo": 0,
    "socket.gethostbyname": 0,
    "socket.gethostbyaddr": 0,
    "socket.getnameinfo": 0,
    "subprocess.Popen": 0,
    "os.system": 0,
    "os.exec": 0,
    "os.fork": 0,
    "os.forkpty": 0,
    "os.posix_spawn": 0,
    "os.spawn": 1,
}
"""What reaches outside, as Python's audit events call it, and which of the event's arguments says where to."""
SHOWN = 80
"""Characters of that argument."""
LIBRARIES = (
    "<",
    *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")},
)
"""How the files begin that nobody looks into for a call of their own."""

_tried: ContextVar[list[LiveCallError] | None] = ContextVar("tried", default=None)
_submitted_at: ContextVar[str] = ContextVar("submitted_at", default="")
"""In a thread: where it was given its work."""


@contextmanager
def offline() -> Generator[list[LiveCallError]]:
    """Refuse what the code inside tries to reach; what that was. In a running event loop."""
    _watch()
    _follow_into_threads(asyncio.get_running_loop())
    tried: list[LiveCallError] = []
    token = _tried.set(tried)
    try:
        yield tried
    finally:
        _tried.reset(token)


def expect_online(what: str) -> None:
    """To be called by what answers from outside without a connection that is seen here.

    Raises:
        LiveCallError: it is called by code that runs offline.
    """
    tried = _tried.get()
    if tried is not None:
        tried.append(LiveCallError(what, place=_place()))
        raise tried[-1]


@cache
def _watch() -> None:
    """Once in a process: audit hooks stay."""
    sys.addaudithook(_refuse)


def _refuse(event: str, arguments: tuple[object, ...]) -> None:
    if event in AUDITED and _tried.get() is not None:
        telling = AUDITED[event]
        said = (f" {argument!r:.{SHOWN}}" for argument in arguments[telling : telling + 1])
        expect_online(event + "".join(said))


def _follow_into_threads(loop: asyncio.AbstractEventLoop) -> None:
    """Asyncio looks names up in threads of its pool, to which it gives no context."""
    if not isinstance(loop, asyncio.BaseEventLoop) or "run_in_executor" in vars(loop):
        return
    run_in_executor = loop.run_in_executor

    def run_in_context(
        executor: Executor | None, function: Callable[..., Any], *arguments: Any
    ) -> asyncio.Future[Any]:
        if _tried.get() is None or not isinstance(executor, ThreadPoolExecutor | None):
            return run_in_executor(executor, function, *arguments)
        context = copy_context()
        context.run(_submitted_at.set, _place())
        return run_in_executor(executor, partial(context.run, function, *arguments))

    vars(loop)["run_in_executor"] = run_in_context


def _place() -> str:
    """The line that calls, `file:line`, of the code that is neither a library's nor ours; empty where none is on the stack."""
    for frame, line in walk_stack(None):
        file = frame.f_code.co_filename
        ours = frame.f_globals.get("__name__", "").partition(".")[0] == "aworld_runtime"
        if not ours and not file.startswith(LIBRARIES):
            return f"{os.path.relpath(file)}:{line}"
    return _submitted_at.get()
