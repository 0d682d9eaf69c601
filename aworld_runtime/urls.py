"""URLs of buses and stores as they may be shown, logged and kept: without the password."""

from __future__ import annotations

import re

_USER = re.compile(r"(://[^\s/?#@:]*):[^\s\"']*@")
"""To the last @: a password in which somebody forgot to encode a / is one, too."""
_PLACE = re.compile(r"([^/?#]*)([^?#]*)(.*)")
_PARAMETER = re.compile(r"([?&][^\s=&#]*password[^\s=&#]*)=[^\s&#]*", re.IGNORECASE)


def shown(text: str) -> str:
    """A URL, or text with URLs in it, with `***` where a password stands."""
    return _PARAMETER.sub(r"\1=***", _USER.sub(r"\1:***@", text))


def check_user(url: str) -> None:
    """See whether user and password are encoded: where they aren't, a part of them passes for the server's place.

    Raises:
        ValueError: a '/', '?' or '#' in them; doesn't repeat them.
    """
    place, path, rest = _PLACE.findall(url.partition("://")[2])[0]
    misplaced = "@" in path or ("@" in rest and not re.fullmatch(r"[^:]+(:\d+)?", place))
    if misplaced and "@" not in place:
        raise ValueError("in user and password write %2F for '/', %3F for '?', %23 for '#'")
