"""Why code does something else than the record: read off the two events that differ, and off the source."""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from inspect import getfile, getsourcelines
from itertools import zip_longest
from pathlib import Path
from typing import Literal, cast

from pydantic import JsonValue

from aworld_runtime.errors import UsageError
from aworld_runtime.events import Event, ModelRequested
from aworld_runtime.messages import Message, ToolSpec
from aworld_runtime.nodes.journal import comparable, same
from aworld_runtime.nodes.node import Node
from aworld_runtime.replay.lint import Finding, lint_file

Cause = Literal[
    "changed prompt",
    "changed tools",
    "reordered tools",
    "changed model settings",
    "non-determinism",
    "live call",
    "changed code",
]
SETTINGS = ("model", "temperature", "max_tokens")
SHOWN = 60
"""Characters of a value that are shown."""
SHOWN_PATHS = 3


def cause_of(recorded: Event, replayed: Event) -> tuple[Cause, list[str]]:
    """The likely cause, by where two events differ, and what there was and is."""
    one, two = recorded.data, replayed.data
    if isinstance(one, ModelRequested) and isinstance(two, ModelRequested):
        found = [*_of_prompt(one.preamble, two.preamble), *_of_tools(one.tools, two.tools)]
        for name in SETTINGS:
            was, now = getattr(one, name), getattr(two, name)
            if was != now:
                found.append(("changed model settings", _changed(name, was, now)))
        if found:
            return found[0][0], [said for _, said in found]
    if recorded.type != replayed.type:
        return "changed code", [f"{recorded.type} was recorded, {replayed.type} is emitted"]
    paths = list(differences(comparable(recorded), comparable(replayed)))
    more = [f"… {len(paths) - SHOWN_PATHS} more"] if len(paths) > SHOWN_PATHS else []
    return "changed code", [*paths[:SHOWN_PATHS], *more]


def suspects(node: Node, program: str) -> list[Finding]:
    """What the lint finds where a node is written, and where the program is: first what surely runs, by `surely_runs`."""
    found: list[Finding] = []
    for name in dict.fromkeys((type(node).__module__, program.partition(":")[0])):
        file = getattr(sys.modules.get(name), "__file__", None) or ""
        if file.endswith(".py") and name.partition(".")[0] != "aworld_runtime":
            with suppress(UsageError):  # it was changed since, and can't be read now
                found += lint_file(Path(os.path.relpath(file)))
    return sorted(found, key=lambda finding: not surely_runs(finding, node))


def surely_runs(finding: Finding, node: Node) -> bool:
    """Whether it is in the node's class, or runs as its module is imported; not elsewhere in the module."""
    cls = type(node).__qualname__.replace(".<locals>", "")
    return not finding.within or f"{finding.within}.".startswith(f"{cls}.")


def place(cls: type[object]) -> str:
    """Where a class is written, as far as that is known."""
    name = f"{cls.__module__}.{cls.__qualname__}"
    try:
        return f"{name} ({os.path.relpath(getfile(cls))}:{getsourcelines(cls)[1]})"
    except (OSError, TypeError):  # made in a notebook, or by a function
        return name


def _of_prompt(one: Sequence[Message], two: Sequence[Message]) -> Iterator[tuple[Cause, str]]:
    for number, (was, now) in enumerate(zip_longest(one, two), 1):
        if was == now:
            continue
        if was is None or now is None:
            there = cast("Message", was or now)
            what = f"is {'new' if was is None else 'gone'}: {_shown(there.content)}"
        elif (was.role, was.content) == (now.role, now.content):
            sides = was.model_dump(mode="json"), now.model_dump(mode="json")
            what = "; ".join(differences(*sides))
        elif was.role != now.role:
            what = f"is of the {now.role} now"
        else:
            what = _of_words(was.content, now.content)
        role = cast("Message", was or now).role
        yield "changed prompt", f"message {number} ({role}), {what}"
        return  # what comes after it differs because of it


def _of_words(was: str, now: str) -> str:
    one, two = was.split(), now.split()
    matcher = difflib.SequenceMatcher(None, one, two, autojunk=False)
    for tag, a, b, c, d in matcher.get_opcodes():
        old, new = _shown(" ".join(one[a:b])), _shown(" ".join(two[c:d]))
        if tag != "equal":
            what = {"replace": f"{old} is now {new}", "delete": f"{old} is gone"}
            return f"word {a + 1}: {what.get(tag, f'{new} is new')}"
    return "its white space"


def _of_tools(one: Sequence[ToolSpec], two: Sequence[ToolSpec]) -> Iterator[tuple[Cause, str]]:
    was, now = {tool.name: tool for tool in one}, {tool.name: tool for tool in two}
    said = [f"tool {name} is gone" for name in was if name not in now]
    said += [f"tool {name} is new" for name in now if name not in was]
    for name in was.keys() & now.keys():
        sides = was[name].model_dump(mode="json"), now[name].model_dump(mode="json")
        said += [f"tool {name}, {path}" for path in differences(*sides)]
    for each in said:
        yield "changed tools", each
    if not said and list(was) != list(now):
        yield "reordered tools", f"tools {', '.join(was)} come as {', '.join(now)}"


def differences(was: JsonValue, now: JsonValue, path: str = "") -> Iterator[str]:
    """Where two JSON values differ, with both."""
    if isinstance(was, dict) and isinstance(now, dict):
        for name in {**was, **now}:
            yield from differences(was.get(name), now.get(name), f"{path}.{name}".lstrip("."))
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for number, (one, two) in enumerate(zip(was, now, strict=True)):
            yield from differences(one, two, f"{path}[{number}]")
    elif not same(was, now):
        yield _changed(path, was, now)


def _changed(name: str, was: object, now: object) -> str:
    if isinstance(was, str) and isinstance(now, str) and min(len(was), len(now)) > SHOWN:
        return f"{name}, {_of_words(was, now)}"
    return f"{name}: {_shown(was)} is now {_shown(now)}"


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
