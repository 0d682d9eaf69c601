"""How log lines are written: text for people, JSON for machines; a URL's password in neither."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from datetime import UTC, datetime

from aworld_runtime.cli.streams import printable
from aworld_runtime.telemetry import log_fields
from aworld_runtime.urls import shown

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
CHATTY = ("httpx2", "httpcore", "openai", "anthropic")
"""Packages that tell every request at level info."""


class TextLines(logging.Formatter):
    """One line for a person; an exception follows it."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return printable(shown(super().format(record)), keep="\n\t")


class JsonLines(logging.Formatter):
    """One JSON object per line: time, level, logger, message; exception, episode, run and worker where there are any."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": shown(record.getMessage()),
            **log_fields(),
        }
        if record.exc_info:
            line["exception"] = shown(self.formatException(record.exc_info))
        return json.dumps(line, ensure_ascii=False)


def add_logging(parser: argparse.ArgumentParser) -> None:
    """To a command, and to each of its actions. What isn't given is absent: an action must not undo its command's."""
    group = parser.add_argument_group("logs, on stderr")
    group.add_argument(
        "--log-format",
        choices=FORMATS,
        default=argparse.SUPPRESS,
        help="default: $AWORLD_LOG_FORMAT, or text",
    )
    group.add_argument(
        "--log-level",
        choices=LEVELS,
        default=argparse.SUPPRESS,
        help="default: $AWORLD_LOG_LEVEL, or what suits the command",
    )


def set_up_logging(
    form: str | None = None, level: str | None = None, *, usual_level: str | None = None
) -> None:
    """Write this process's log lines to stderr. None: as the environment says.

    Without a wish from anybody nothing is set up: warnings then appear as bare lines, which is what suits a command that
    prints its result and ends.

    Raises:
        ConfigError: the environment names no such format or level.
    """
    from aworld_runtime.config import LogSettings

    settings = LogSettings.from_env()
    form = form or settings.format
    level = level or settings.level or usual_level
    if form is None and level is None:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(level=(level or "warning").upper(), handlers=[handler])
    if level != "debug":
        for name in CHATTY:
            logging.getLogger(name).setLevel(logging.WARNING)
