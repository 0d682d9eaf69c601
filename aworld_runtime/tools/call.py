"""One tool call, made safe: arguments checked, time and output bounded, every failure a `ToolError`.

`call` is the one boundary that turns what a tool does wrong into something an agent can be told.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextvars import ContextVar
from copy import deepcopy

import anyio
import pydantic_core
from pydantic import JsonValue

from aworld_runtime.errors import ToolArgumentsError, ToolError, ToolTimeoutError, leaves
from aworld_runtime.messages import ToolSpec
from aworld_runtime.tools.base import BaseTool

MAX_OUTPUT = 32 * 1024
"""Bytes of a result or an error message; above, the middle is cut out."""

_call_id: ContextVar[str] = ContextVar("call_id", default="")


def call_id() -> str:
    """In a tool: the id of the call it is in; empty outside of one.

    It is the same when the call is made again because a process died in it: an idempotency key for what the tool does.
    """
    return _call_id.get()


async def call(tool: BaseTool, arguments: Mapping[str, JsonValue], *, key: str = "") -> JsonValue:
    """Call `tool` and return its result, cut to `MAX_OUTPUT` and made fit for a log. `key` is its `call_id`.

    Raises:
        ToolArgumentsError: an argument is missing or unknown, or the tool refused it.
        ToolTimeoutError: the tool took longer than its `timeout_s`.
        ToolError: anything else that went wrong in the tool, with the error's type and message.
    """
    token = _call_id.set(key)
    try:
        spec = tool.get_schema()
        _check(spec, arguments)
        with anyio.move_on_after(tool.timeout_s):
            # Its own: what it does to them must not change the event that holds them.
            return _capped(await tool.run(**deepcopy(dict(arguments))), spec.name)
    except ToolError:
        raise
    except anyio.get_cancelled_exc_class() as error:
        if is_cancelled():
            raise
        raise ToolError(f"{type(error).__name__}: the tool cancelled itself") from error
    except (Exception, SystemExit) as error:  # the boundary: the agent is told, whatever it is
        raise ToolError(f"{type(error).__name__}: {told(error)}") from error
    finally:
        _call_id.reset(token)
    raise ToolTimeoutError(f"{spec.name} did not answer within {tool.timeout_s:g} s")


def cut(text: str, limit: int = MAX_OUTPUT) -> str:
    """`text`, or its head and tail with a note between, in at most about `limit` bytes of valid Unicode."""
    raw = text.encode("utf-8", "replace")
    if len(raw) <= limit:
        return raw.decode()
    head, tail = raw[: limit * 3 // 4], raw[-(limit // 4) :]
    note = f"\n[... {len(raw) - len(head) - len(tail)} of {len(raw)} bytes cut ...]\n"
    return head.decode("utf-8", "ignore") + note + tail.decode("utf-8", "ignore")


def is_cancelled() -> bool:
    """Whether somebody cancels this task. A `CancelledError` is else only what some code raised, or awaited."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def told(error: BaseException) -> str:
    """What `error` says, cut; of a group what is inside, too. Its `__str__` is the code of whoever raised it, and may fail too."""
    try:
        inside = [f"{type(each).__name__}: {each}" for each in leaves(error) if each is not error]
        return cut("; ".join([str(error), *inside]))
    except (Exception, SystemExit) as fault:  # noqa: BLE001 - the boundary: user code
        return f"no message, its __str__ raised {type(fault).__name__}"


def _check(spec: ToolSpec, arguments: Mapping[str, JsonValue]) -> None:
    """What every schema says in the same way; types are the tool's own business."""
    properties = spec.parameters.get("properties")
    required = spec.parameters.get("required")
    if isinstance(required, list):
        missing = [str(name) for name in required if name not in arguments]
        if missing:
            raise ToolArgumentsError(f"{spec.name}: missing argument {', '.join(missing)}")
    if isinstance(properties, dict) and not spec.parameters.get("additionalProperties"):
        unknown = [name for name in arguments if name not in properties]
        if unknown:
            known = ", ".join(properties) or "none"
            raise ToolArgumentsError(
                f"{spec.name}: unknown argument {', '.join(unknown)}; it takes {known}"
            )


def _capped(result: JsonValue, name: str) -> JsonValue:
    """`result` as it is read from a log; as text, cut, where it is too large."""
    if isinstance(result, str):
        return cut(result)
    try:
        text = json.dumps(result, ensure_ascii=False, allow_nan=False)
        shorter = cut(text)
        if shorter != text:
            return shorter
        # Read where an event has it: how deep JSON may go, and how long its numbers are, has limits.
        return pydantic_core.from_json(f'{{"data": {{"content": {text}}}}}')["data"]["content"]
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolError(
            f"{name} returned a {type(result).__name__} that can't be written as JSON: {error}"
        ) from error
