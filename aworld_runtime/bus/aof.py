"""Takes the holes out of the append-only file of a Redis or Valkey server.

    commands, zeros, commands ─▶ commands, commands

Redis 7.0 and Valkey 9.1 don't open for appending the file that they begin in a rewrite. What a full disk cuts short they
take back, and then go on where it had ended: between two commands there is a hole, and the server refuses the file at its
next start. Nothing is in the hole, so without it the file says all that was acknowledged. Other damage is not touched.
"""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path

NEWLINE = b"\r\n"
SOMETHING = re.compile(rb"[^\0]")
Content = bytes | mmap.mmap


class DamagedFileError(ValueError):
    """Something in it is neither a command nor a hole."""


def mend(folder: Path) -> int:
    """Take the holes out of the files there; returns how many bytes of nothing they were.

    Raises:
        DamagedFileError: a file has other damage, too; it is left as it is.
    """
    return sum(_mend(path) for path in sorted(folder.glob("*.incr.aof")) if path.stat().st_size)


def _mend(path: Path) -> int:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        holes = find_holes(content)
        if not holes:
            return 0
        mended = path.parent.with_name(f"{path.name}.mended")
        with mended.open("wb") as whole:
            at = 0
            for begin, end in [*holes, (len(content), len(content))]:
                whole.write(content[at:begin])
                at = end
            whole.flush()
            os.fsync(whole.fileno())
    mended.replace(path)
    return sum(end - begin for begin, end in holes)


def find_holes(content: Content) -> list[tuple[int, int]]:
    """Where they begin and end. A command that is cut at the end is no damage: a death leaves it, and the server drops it.

    Raises:
        DamagedFileError: there is something else.
    """
    holes: list[tuple[int, int]] = []
    at: int | None = 0
    while at is not None and at < len(content):
        match content[at : at + 1]:
            case b"*":
                at = _after_command(content, at)
            case b"#":  # a note of the time
                _, at = _line(content, at)
            case b"\0":
                something = SOMETHING.search(content, at)
                holes.append((at, something.start() if something else len(content)))
                at = holes[-1][1]
            case other:
                raise DamagedFileError(f"{other!r} at byte {at} begins no command")
    return holes


def _after_command(content: Content, at: int) -> int | None:
    """Where the command ends that begins here; None where the file ends first."""
    count, begin = _number(content, at, b"*")
    for _ in range(count):
        if begin is None:
            return None
        length, begin = _number(content, begin, b"$")
        if begin is None or begin + length + len(NEWLINE) > len(content):
            return None
        begin += length + len(NEWLINE)
        if content[begin - len(NEWLINE) : begin] != NEWLINE:
            raise DamagedFileError(f"the command at byte {at} has another length than it says")
    return begin


def _number(content: Content, at: int, sign: bytes) -> tuple[int, int | None]:
    line, after = _line(content, at)
    if after is not None and not (line.startswith(sign) and line[1:].isdigit()):
        raise DamagedFileError(f"{line[:20]!r} at byte {at} is no part of a command")
    return int(line[1:] or 0) if after is not None else 0, after


def _line(content: Content, at: int) -> tuple[bytes, int | None]:
    end = content.find(NEWLINE, at)
    return (b"", None) if end < 0 else (content[at:end], end + len(NEWLINE))
