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
        if isinstance(item, str | bytes):
            total += len(item)
        elif isinstance(item, int):
            total += item.bit_length() >> 3
        elif isinstance(item, BaseModel):
            fields = item.__dict__
            total += 16 * len(fields)
            rest += fields.values()
        elif isinstance(item, dict):
            mapping = cast("dict[str, Any]", item)
            total += sum(map(len, mapping))
            rest += mapping.values()
        elif isinstance(item, list):
            rest += cast("list[Any]", item)
        elif isinstance(item, tuple):
            numbers = cast("tuple[Any, ...]", item)
            if len(numbers) > MANY and isinstance(numbers[0], int | float):
                total += 8 * len(numbers)
            else:
                rest += numbers
    return total
