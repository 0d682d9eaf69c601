"""What was recorded, beside what came this time."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from aworld_runtime.cli.streams import printable

if TYPE_CHECKING:
    from aworld_runtime.replay.replay import Divergence


def explained(divergence: Divergence, width: int) -> str:
    """The likely cause of a difference, and its two sides; a prompt's hash differs with what else does."""
    recorded, replayed = divergence.recorded, divergence.replayed
    if _without_hash(recorded) != _without_hash(replayed):
        recorded, replayed = _without_hash(recorded), _without_hash(replayed)
    sides = side_by_side(recorded, replayed, width)
    advice = [f"  {printable(line)}" for line in divergence.advice]
    return "\n".join([f"likely cause: {divergence.cause}", *advice, sides])


def _without_hash(event: str) -> str:
    return re.sub(r'^ *"prompt_sha256": .*\n', "", event, flags=re.MULTILINE)


def side_by_side(
    recorded: str, replayed: str, width: int, heads: tuple[str, str] = ("RECORDED", "THIS TIME")
) -> str:
    """Two columns of the lines that differ, each cut to where it begins to."""
    import difflib
    from itertools import zip_longest

    column = max((width - 3) // 2, 20)
    left, right = (
        printable(recorded, keep="\n").split("\n"),
        printable(replayed, keep="\n").split("\n"),
    )
    rows = [heads]
    for tag, a, b, c, d in difflib.SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        if tag != "equal":
            rows += zip_longest(left[a:b], right[c:d], fillvalue="")
    return "\n".join(
        " │ ".join((one.ljust(column), two)).rstrip()
        for one, two in (_around_difference(row, column) for row in rows)
    )


def _around_difference(row: tuple[str, str], column: int) -> tuple[str, str]:
    if max(map(len, row)) <= column:
        return row
    pairs = enumerate(zip(*row, strict=False))
    same = next((i for i, (one, two) in pairs if one != two), min(map(len, row)))
    start = max(same - column // 3, 0)
    one, two = (_window(text, start, column) for text in row)
    return one, two


def _window(text: str, start: int, column: int) -> str:
    head = "…" if start and text else ""
    rest = text[start:]
    room = column - len(head)
    return head + (rest if len(rest) <= room else rest[: room - 1] + "…")
