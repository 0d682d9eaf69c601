"""Predicates on events, as people write them for breakpoints: `type=tool.called and data.name=calculator`.

    predicate   := all ("or" all)*
    all         := one ("and" one)*
    one         := "not" one | "(" predicate ")" | path op value | type
    op          := "=" | "!=" | "<" | "<=" | ">" | ">=" | "~"          (~: contains)

A path names a field of the event, then fields inside it. What an object has no such field for is looked for in the
objects inside it: `name` finds `data.call.name`. Where it finds several values, one that fits is enough; `a!=b` is
`not a=b`. Values are compared as numbers where both are, else as text; what is no plain word stands in quotes.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from pydantic import JsonValue

from aworld_runtime.errors import PredicateError
from aworld_runtime.events import Event

LONGEST = 4096
"""Characters."""
DEEPEST = 50
"""Parentheses and `not`s inside one another."""

_TOKEN = re.compile(
    r"""(?P<op>!=|<=|>=|[=<>~])|(?P<bracket>[()])|(?P<word>(?:[^\s()=<>~!"']|!(?!=))+)"""
    r"""|"(?P<double>(?:[^"\\]|\\.)*)"|'(?P<single>(?:[^'\\]|\\.)*)'""",
    re.DOTALL,
)
_PATH = re.compile(r"[^.]+(\.[^.]+)*")
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_KEYWORDS = frozenset({"and", "or", "not"})
_PLAIN = frozenset(Event.model_fields) - {"time", "deadline", "data"}
"""Fields that are JSON as they are; `seq`, which no dump has, among them."""


@dataclass(frozen=True, slots=True)
class Comparison:
    path: str
    op: str
    value: str

    def holds(self, event: Event) -> bool:
        found = values(event, self.path)
        if self.op == "!=":
            return not any(_compare(value, "=", self.value) for value in found)
        return any(_compare(value, self.op, self.value) for value in found)

    def __str__(self) -> str:
        bare = _TOKEN.fullmatch(self.value)
        if bare is None or bare.lastgroup != "word" or self.value in _KEYWORDS:
            escaped = self.value.replace("\\", "\\\\").replace('"', '\\"')
            return f'{self.path}{self.op}"{escaped}"'
        return f"{self.path}{self.op}{self.value}"


@dataclass(frozen=True, slots=True)
class Not:
    of: Term

    def holds(self, event: Event) -> bool:
        return not self.of.holds(event)

    def __str__(self) -> str:
        return f"not {_bracketed(self.of, Many)}"


@dataclass(frozen=True, slots=True)
class Many:
    """All (`and`) or any (`or`) of at least two."""

    word: str
    of: tuple[Term, ...]

    def holds(self, event: Event) -> bool:
        return (all if self.word == "and" else any)(term.holds(event) for term in self.of)

    def __str__(self) -> str:
        return f" {self.word} ".join(
            # `and` binds tighter; one inside its like was in parentheses.
            str(term)
            if isinstance(term, Many) and (self.word, term.word) == ("or", "and")
            else _bracketed(term, Many)
            for term in self.of
        )


Term: TypeAlias = Comparison | Not | Many


def _bracketed(term: Term, kind: type[Term]) -> str:
    return f"({term})" if isinstance(term, kind) else str(term)


@dataclass(frozen=True, slots=True)
class Predicate:
    """What is true of some events; `str` of it parses to the same."""

    term: Term

    @classmethod
    def parse(cls, text: str) -> Predicate:
        """Read one, as the module describes.

        Raises:
            PredicateError: it is none; says where.
        """
        if len(text) > LONGEST:
            raise PredicateError(
                f"a predicate of {len(text)} characters; at most {LONGEST} are read"
            )
        return cls(_Parser(text).whole())

    def matches(self, event: Event) -> bool:
        try:
            return self.term.holds(event)
        except ValueError:  # JSON can't hold it, nor can a log: it is about to be refused
            return False

    def __str__(self) -> str:
        return str(self.term)


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(self._read())
        self._next = 0

    def _read(self) -> Iterator[re.Match[str]]:
        at = 0
        while rest := self._text[at:].lstrip():
            at = len(self._text) - len(rest)
            token = _TOKEN.match(self._text, at)
            if token is None:
                what = "a quote that isn't closed" if rest[0] in "\"'" else f"{rest[0]!r}"
                raise self._error(what, at)
            yield token
            at = token.end()

    def whole(self) -> Term:
        term = self._many("or", 0)
        if self._next < len(self._tokens):
            raise self._unexpected("and, or, or the end")
        return term

    def _many(self, word: str, depth: int) -> Term:
        terms: list[Term] = []
        while not terms or self._take(word):
            terms.append(self._many("and", depth) if word == "or" else self._one(depth))
        return terms[0] if len(terms) == 1 else Many(word, tuple(terms))

    def _one(self, depth: int) -> Term:
        if depth > DEEPEST:
            raise self._error(f"more than {DEEPEST} parentheses and nots inside one another")
        if self._take("not"):
            return Not(self._one(depth + 1))
        if self._take("("):
            term = self._many("or", depth + 1)
            if not self._take(")"):
                raise self._unexpected(")")
            return term
        path = self._peek("word")
        if path is None or path in _KEYWORDS or not _PATH.fullmatch(path):
            raise self._unexpected("a field such as type or data.name")
        self._next += 1
        op = self._peek("op")
        if op is None:
            if "." not in path:
                raise self._unexpected("= != < <= > >= or ~")
            return Comparison("type", "=", path)
        self._next += 1
        return Comparison(path, op, self._value())

    def _value(self) -> str:
        for kind in ("double", "single"):
            if (quoted := self._peek(kind)) is not None:
                self._next += 1
                return re.sub(r"\\(.)", r"\1", quoted, flags=re.DOTALL)
        word = self._peek("word")
        if word is None or word in _KEYWORDS:
            raise self._unexpected("a value, in quotes if it is no plain word")
        self._next += 1
        return word

    def _peek(self, kind: str) -> str | None:
        return self._tokens[self._next][kind] if self._next < len(self._tokens) else None

    def _take(self, text: str) -> bool:
        taken = text in (self._peek("word"), self._peek("bracket"))
        self._next += taken
        return taken

    def _unexpected(self, wanted: str) -> PredicateError:
        there = self._tokens[self._next : self._next + 1]
        return self._error(f"expected {wanted}" + "".join(f", not {t[0]!r:.100}" for t in there))

    def _error(self, what: str, at: int | None = None) -> PredicateError:
        if at is None:
            there = self._tokens[self._next : self._next + 1]
            at = there[0].start() if there else len(self._text)
        return PredicateError(f"predicate {self._text!r:.200}, at character {at + 1}: {what}")


# --- values ----------------------------------------------------------------------------------------------------------


def values(event: Event, path: str) -> list[JsonValue]:
    """What a path leads to in an event.

    Raises:
        ValueError: JSON can't hold it.
    """
    if path in _PLAIN:
        return [getattr(event, path)]
    names = path.split(".")
    # The data may be large: it is written only where it is asked for.
    field = names[0] if names[0] in Event.model_fields else "data"
    found: list[JsonValue] = [event.model_dump(mode="json", include={field})]
    for name in names:
        found = _named(found, name)
    return found


def _named(within: list[JsonValue], name: str) -> list[JsonValue]:
    """Values of that name: those nearest to the surface."""
    while within:
        objects = [value for value in within if isinstance(value, dict)]
        if found := [value[name] for value in objects if name in value]:
            return found
        inside = [list(value.values()) for value in objects]
        inside += [value for value in within if isinstance(value, list)]
        within = [value for each in inside for value in each]
    return []


def _text(value: JsonValue) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _compare(value: JsonValue, op: str, wanted: str) -> bool:
    text = _text(value)
    if op == "~":
        return wanted in text
    if _NUMBER.fullmatch(text) and _NUMBER.fullmatch(wanted):
        return _OPERATORS[op](float(text), float(wanted))
    return _OPERATORS[op](text, wanted)
