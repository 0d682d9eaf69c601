"""How large an event is, without encoding it."""

from __future__ import annotations

from typing import Any, cast

from pydantic import BaseModel

MANY = 32
"""A longer tuple that begins with a number is one of token ids or logprobs, and counts as a whole."""


def weight(value: Any) -> int:
    """About how many bytes a payload holds: never less than a sixth of its JSON."""
    total = 0
    rest: list[Any] = [value]
    while rest:
        item = rest.pop()
        total += 8
        kind = cast("type[object]", type(item))
        if kind is str:
            total += len(item)
        elif kind is int:
            total += item.bit_length() >> 3
        elif kind is dict:
            mapping = cast("dict[str, Any]", item)
            total += sum(map(len, mapping))
            rest += mapping.values()
        elif kind is list:
            rest += item
        elif kind is tuple:
            if len(item) > MANY and isinstance(item[0], int | float):
                total += 8 * len(item)
            else:
                rest += item
        elif isinstance(item, BaseModel):
            total += 16 * len(item.__dict__)
            rest += item.__dict__.values()
        elif isinstance(item, str | bytes):
            total += len(item)
    return total
