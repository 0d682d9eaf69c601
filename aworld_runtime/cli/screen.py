"""Lines for a terminal, or for whatever stands in its place: what it can show, and lines at its end that are drawn again.

What comes from a model or a tool is shown, never obeyed: control characters are written as escapes.
"""

from __future__ import annotations

import os
import shutil
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO, TypeAlias

PLAIN, BOLD, DIM, RED, GREEN, YELLOW, CYAN = "", "1", "2", "31", "32", "33", "36"
"""How a piece of a line looks: parameters of the terminal's escape sequence."""
Piece: TypeAlias = tuple[str, str]
Line: TypeAlias = Sequence[Piece]

PIPE_WIDTH = 160
"""Columns where nobody says how many there are."""
ASCII = str.maketrans(
    {"├": "|", "└": "`", "│": "|", "─": "-", "→": ">", "←": "<", "✗": "x", "…": "~", "·": "-"}
)
"""One for one, so that columns stay where they are."""
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
BEGIN_FRAME, END_FRAME = "\x1b[?2026h", "\x1b[?2026l"
"""A terminal that knows them shows what is between them at once; others pass them over."""
CLEAR_BELOW, CLEAR_REST = "\x1b[J", "\x1b[K"


@dataclass(frozen=True, slots=True)
class Look:
    """What can be shown."""

    colour: bool = False
    redraw: bool = False
    """What was written can be written over."""
    encoding: str = "utf-8"

    @classmethod
    def of(cls, out: TextIO) -> Look:
        """As `out` and the environment say: TERM, NO_COLOR."""
        terminal = out.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        colour = terminal and not os.environ.get("NO_COLOR")
        return cls(colour, terminal, out.encoding or "ascii")

    def safe(self, text: str) -> str:
        """`text` without what a terminal would obey or can't show."""
        if text.isascii() and text.isprintable():
            return text
        text = "".join(c if c.isprintable() else _escaped(c) for c in text)
        try:
            text.encode(self.encoding)
        except UnicodeEncodeError:
            return (
                text.translate(ASCII)
                .encode(self.encoding, "backslashreplace")
                .decode(self.encoding)
            )
        return text

    def paint(self, line: Line, width: int) -> str:
        """The line, cut to `width` columns, without blanks at its end."""
        painted: list[str] = []
        line = [piece for piece in line if piece[0]]
        for place, (text, style) in enumerate(line, 1):
            cut = self.fit(text if place < len(line) else text.rstrip(), width)
            width -= cells(cut)
            painted.append(f"\x1b[{style}m{cut}\x1b[0m" if self.colour and style and cut else cut)
        return "".join(painted)

    def fit(self, text: str, width: int) -> str:
        """`text`, made safe, on at most `width` columns."""
        text = self.safe(text[: 4 * max(width, 0) + 4])
        if cells(text) <= width:
            return text
        kept, left = "", width - 1
        for c in text:
            left -= cells(c)
            if left < 0:
                break
            kept += c
        return kept + self.safe("…") if width > 0 else ""


class Screen:
    """Writes lines that stay, and below them, where `look.redraw`, some that are drawn again and again."""

    def __init__(self, out: TextIO, look: Look) -> None:
        self.look = look
        self._out = out
        self._drawn: list[str] = []
        self._hidden = False

    @property
    def size(self) -> tuple[int, int]:
        """Columns that a line may take, and rows. A terminal's last column is left free: some wrap behind it."""
        columns, rows = shutil.get_terminal_size((PIPE_WIDTH, 24))
        return columns - self.look.redraw, rows

    def write(self, settled: Sequence[Line], live: Sequence[Line] = ()) -> None:
        """Add `settled` for good, and put `live` in place of what was live before."""
        columns, rows = self.size
        staying = [self.look.paint(line, columns) for line in settled]
        if not self.look.redraw:
            if staying:
                self._out.write("\n".join([*staying, ""]))
                self._out.flush()
            return
        drawn = [self.look.paint(line, columns) for line in _within(live, rows - 1)]
        if not staying and drawn == self._drawn:
            return
        # What is there may have been wrapped since, by a terminal that was made narrower.
        up = sum(1 + max(_shown(line) - 1, 0) // (columns + 1) for line in self._drawn)
        frame = [BEGIN_FRAME, "" if self._hidden else HIDE_CURSOR, f"\x1b[{up}A" if up else ""]
        frame += [f"{line}{CLEAR_REST}\n" for line in (*staying, *drawn)]
        self._out.write("".join([*frame, CLEAR_BELOW, END_FRAME]))
        self._out.flush()
        self._drawn, self._hidden = drawn, True

    def close(self) -> None:
        """What is live stays as it is; the cursor is below it."""
        if self._hidden:
            self._out.write(SHOW_CURSOR)
            self._out.flush()
            self._hidden = False


def _within(lines: Sequence[Line], rows: int) -> Sequence[Line]:
    """The first and, before all others, the last."""
    if len(lines) <= rows:
        return lines
    if rows < 3:
        return lines[-1:] if rows > 0 else []
    left_out: Line = [(f"… {len(lines) - rows + 1} more lines", DIM)]
    return [*lines[: rows - 2], left_out, lines[-1]]


def cells(text: str) -> int:
    """Columns that `text` takes."""
    return len(text) if text.isascii() else sum(map(_cells, text))


def _cells(character: str) -> int:
    if unicodedata.category(character) in {"Mn", "Me", "Cf"}:
        return 0
    return 2 if unicodedata.east_asian_width(character) in {"W", "F"} else 1


def _shown(painted: str) -> int:
    """Columns of a painted line: its escape sequences take none."""
    return sum(cells(part.partition("m")[2]) for part in f"m{painted}".split("\x1b["))


def _escaped(character: str) -> str:
    """Another kind of space as a space, what joins the parts of an emoji as nothing, the rest as Python writes it."""
    if character == "\u200d":
        return ""
    is_space = character in "\n\r\t" or unicodedata.category(character) == "Zs"
    return " " if is_space else ascii(character)[1:-1]
