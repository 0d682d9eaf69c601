"""What goes to the terminal: everything can be written there, and nothing is obeyed that came from a model or a tool."""

from __future__ import annotations

import codecs
import io
import json
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager, redirect_stdout


def printable(text: str, *, keep: str = "") -> str:
    """`text` without what a terminal might obey; characters to `keep` aside."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


@contextmanager
def own_prints(*, apart: bool) -> Generator[None]:
    """What a user's code prints meanwhile goes to standard error: where it is kept apart from a command's JSON."""
    if apart:
        with redirect_stdout(sys.stderr):
            yield
    else:
        yield


def open_streams() -> None:
    """Have a standard output and error: what they have no letter for is escaped as in JSON, and one that is closed is nowhere."""
    codecs.register_error("json", _escaped)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            stream = open(os.devnull, "w")  # noqa: SIM115, PTH123 - for as long as the process lives
            setattr(sys, name, stream)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="json")


def _escaped(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end
