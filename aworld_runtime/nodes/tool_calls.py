"""Making a tool call: whatever comes of it is an event for the caller."""

from __future__ import annotations

from collections.abc import Mapping

from aworld_runtime import telemetry
from aworld_runtime.errors import ToolError
from aworld_runtime.events import Event, ToolCalled, ToolFailed, ToolReturned
from aworld_runtime.tools.base import BaseTool
from aworld_runtime.tools.call import call, told


async def answer_call(
    called: Event, tool: BaseTool | None, *, source: str, known: Mapping[str, BaseTool]
) -> Event:
    """Make the call, with `tool` if there is one; `known` are all that the caller has."""
    answer = await _answer(called, tool, source=source, known=known)
    label = answer.role if answer.role in known else "unknown"
    telemetry.TOOL_CALLS.add(1, label)
    telemetry.TOOL_FAILURES.add(isinstance(answer.data, ToolFailed), label)
    return answer


async def _answer(
    called: Event, tool: BaseTool | None, *, source: str, known: Mapping[str, BaseTool]
) -> Event:
    if not isinstance(called.data, ToolCalled):
        raise TypeError(f"{called.type} is no tool call")
    request = called.data.call
    if tool is None:
        message = f"no tool {request.name!r}; there are: {', '.join(sorted(known)) or 'none'}"
        return answer_event(
            called,
            ToolFailed(name=request.name, error="UnknownToolError", message=message),
            source=source,
        )
    if request.malformed is not None:
        message = f"the call is not valid JSON: {request.malformed[:200]}"
        return answer_event(
            called,
            ToolFailed(name=request.name, error="ToolArgumentsError", message=message),
            source=source,
        )
    try:
        content = await call(tool, request.arguments, key=called.id)
    except ToolError as error:
        failed = ToolFailed(name=request.name, error=type(error).__name__, message=told(error))
        return answer_event(called, failed, source=source)
    return answer_event(called, ToolReturned(name=request.name, content=content), source=source)


def answer_event(called: Event, data: ToolReturned | ToolFailed, *, source: str) -> Event:
    return called.caused(
        data, source=source, correlation_id=called.id, to=called.role, trust="tool"
    )
