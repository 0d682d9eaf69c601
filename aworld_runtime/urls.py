"""URLs of buses and stores as they may be shown, logged and kept: without the password."""

from __future__ import annotations

import re

_USER = re.compile(r"(://[^\s/?#@:]*):[^\s/?#]*@")
_PARAMETER = re.compile(r"([?&][^\s=&#]*password[^\s=&#]*)=[^\s&#]*", re.IGNORECASE)


def shown(text: str) -> str:
    """A URL, or text with URLs in it, with `***` where a password stands."""
    return _PARAMETER.sub(r"\1=***", _USER.sub(r"\1:***@", text))
