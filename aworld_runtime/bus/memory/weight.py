"""How large an event is, without encoding it."""

from __future__ import annotations

import sys
from typing import Any, cast

from pydantic import BaseModel

MANY = 32
"""A longer tuple that begins with a number is one of token ids or logprobs, and counts as a whole."""


DEEP = 100
LONG = 8 * 1024
UNSURE = sys.maxsize
"""Weighs a payload that may be none that can be written and read again: with half a character, a number of more than
`LONG` bits, or what lies more than `DEEP` levels down."""


def weight(data: BaseModel) -> int:
    """About how many bytes a payload holds: never less than a sixth of its JSON."""
    fields = data.__dict__
    total = 8 + 16 * len(fields)
    level: list[Any] = []
    for item in fields.values():  # most payloads end here
        if type(item) is str and item.isascii():
            total += 8 + len(item)
        elif item is not None:
            level.append(item)
    return total + _weight_below(level) if level else total


def _weight_below(level: list[Any]) -> int:
    total = 0
    for _ in range(DEEP):
        below: list[Any] = []
        for item in level:
            total += 8
            kind = cast("type[object]", type(item))
            if kind is str:
                total += len(item) if item.isascii() else _weight_of_text(item)
            elif kind is int:
                bits = item.bit_length()
                total += bits >> 3 if bits <= LONG else UNSURE
            elif kind is dict:
                mapping = cast("dict[str, Any]", item)
                below += mapping.keys()
                below += mapping.values()
            elif kind is tuple and len(item) > MANY and isinstance(item[0], int | float):
                total += 8 * len(item)
            elif kind is list or kind is tuple:
                below += item
            elif isinstance(item, BaseModel):
                total += 16 * len(item.__dict__)
                below += item.__dict__.values()
            elif isinstance(item, str):
                total += _weight_of_text(item)
            elif isinstance(item, bytes):
                total += len(item)
        if not below:
            return total
        level = below
    return UNSURE


def _weight_of_text(text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return UNSURE
