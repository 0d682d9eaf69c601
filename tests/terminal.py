"""What a terminal shows that is sent the bytes of a command; of the escape sequences, it knows those that we use."""

import re

_PARTS = re.compile(r"\x1b\[(\??\d*(?:;\d+)*)([A-Za-z])|[\r\n]|[^\x1b\r\n]+", re.ASCII)


class Terminal:
    """`lines` holds what has scrolled out of sight, too; only the last `height` can be reached."""

    def __init__(self, height: int = 24) -> None:
        self.lines = [""]
        self.shows_cursor = True
        self._height = height
        self._row = self._column = 0

    def feed(self, text: str) -> None:
        for part in _PARTS.finditer(text):
            if part[2] is not None:
                self._obey(part[1], part[2])
            elif part[0] == "\n":
                self._row += 1
                self._column = 0
                self.lines += [""] * (self._row == len(self.lines))
            elif part[0] == "\r":
                self._column = 0
            else:
                line = self.lines[self._row]
                end = self._column + len(part[0])
                self.lines[self._row] = line[: self._column] + part[0] + line[end:]
                self._column = end

    def narrow(self, columns: int) -> None:
        """Wrap what is wider, as a terminal does whose window is made narrower."""
        below = len(self.lines) - self._row
        parts = [
            [line[i : i + columns] for i in range(0, len(line), columns)] or [""]
            for line in self.lines
        ]
        self.lines = [part for line in parts for part in line]
        self._row = len(self.lines) - below

    def _obey(self, number: str, command: str) -> None:
        if command == "A":
            self._row -= int(number)
            assert self._row >= max(len(self.lines) - self._height, 0)
        elif command in "JK":
            self.lines[self._row] = self.lines[self._row][: self._column]
            if command == "J":
                del self.lines[self._row + 1 :]
        elif number == "?25":
            self.shows_cursor = command == "h"
        else:
            assert command == "m" or number == "?2026", f"unknown: {number}{command}"

    def __str__(self) -> str:
        return "\n".join(self.lines)
