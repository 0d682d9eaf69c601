"""Tool calls written as text, in the Hermes format that many open models know.

    <tool_call>{"name": "calculator", "arguments": {"expression": "2 + 3"}}</tool_call>

Pure functions. Chat templates differ in whether they tell a model about its tools; for those that
don't, `render_tools` writes what belongs into the system prompt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, cast

from aworld_runtime.messages import Message, ToolCall, ToolSpec
from aworld_runtime.models.arguments import check_arguments, read_arguments

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
BLOCK = re.compile(rf"{OPEN}(.*?)(?:{CLOSE}|(?={OPEN})|\Z)", re.DOTALL)
NAME = re.compile(r'"name"\s*:\s*"([^"\\]{1,64})"')


def parse(text: str, *, id_prefix: str = "call_") -> tuple[str, tuple[ToolCall, ...]]:
    """The words outside the calls, and the calls in order. What is no valid call is `malformed`.

    Ids are `id_prefix` and the call's number: give a prefix that no other turn has.
    """
    if OPEN not in text:
        return text, ()
    blocks = [block.strip() for block in BLOCK.findall(text)]
    calls = tuple(_read(block, f"{id_prefix}{number}") for number, block in enumerate(blocks))
    return BLOCK.sub("", text).strip(), calls


def write(message: Message) -> str:
    """An assistant's message as text with its calls in it: the reverse of `parse`."""
    calls = (f"{OPEN}{_body(call)}{CLOSE}" for call in message.tool_calls)
    return "\n".join(filter(None, [message.content, *calls]))


def render_tools(specs: Sequence[ToolSpec]) -> str:
    """What a system prompt says about tools; empty without tools."""
    if not specs:
        return ""
    lines = [
        json.dumps(
            {"name": s.name, "description": s.description, "parameters": s.parameters},
            ensure_ascii=False,
        )
        for s in specs
    ]
    example = '{"name": <function-name>, "arguments": <args-json-object>}'
    return (
        "You may call these functions:\n<tools>\n"
        + "\n".join(lines)
        + f"\n</tools>\nTo call one, write:\n{OPEN}{example}{CLOSE}"
    )


def _body(call: ToolCall) -> str:
    if call.malformed is not None:
        return call.malformed
    return json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)


def _read(block: str, call_id: str) -> ToolCall:
    try:
        value: object = read_arguments(block)
        name, arguments = _parts(cast("dict[str, Any]", value))
    except ValueError:
        found = NAME.search(block)
        return ToolCall(id=call_id, name=found[1] if found else "", malformed=block)
    return ToolCall(id=call_id, name=name, arguments=arguments)


def _parts(value: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError("a call needs a name")
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):  # as OpenAI's own format has it
        return name, read_arguments(arguments)
    return name, check_arguments(arguments)
