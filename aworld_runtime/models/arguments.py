"""Text that a model wrote, made fit for a log: tool arguments as JSON objects, and valid Unicode."""

from __future__ import annotations

import json
from typing import NoReturn, cast

import pydantic_core
from pydantic import JsonValue


def read_arguments(text: str) -> dict[str, JsonValue]:
    """The JSON object in `text`; an empty text is an empty object.

    Raises:
        ValueError: not an object, or one that can't be stored: NaN, infinity, half a character, lists in lists 200 deep.
    """
    if not text.strip():
        return {}
    try:
        value = json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deep") from None
    return check_arguments(value)


def check_arguments(value: object) -> dict[str, JsonValue]:
    """`value`, if it is an object that a log can hold.

    Raises:
        ValueError: as for `read_arguments`.
    """
    if not isinstance(value, dict):
        raise ValueError(  # noqa: TRY004 - the text is wrong, not the caller
            f"arguments must be a JSON object, not {type(value).__name__}"
        )
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    # Read where an event has them: how deep JSON may go has a limit.
    pydantic_core.from_json(f'{{"data": {{"tool_calls": [{{"arguments": {text}}}]}}}}'.encode())
    return cast("dict[str, JsonValue]", value)


def readable(text: str) -> str:
    """`text` with half characters (lone surrogates) replaced, which no log could store."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
