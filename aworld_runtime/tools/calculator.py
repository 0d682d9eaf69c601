"""A calculator that is safe to give to a model: it reads the expression's syntax tree, never runs it.

Numbers, + - * / // % **, parentheses and signs. Length, exponents and the size of every intermediate
result are bounded, and so is the time.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable

from pydantic import JsonValue

from aworld_runtime.errors import ToolArgumentsError, ToolError
from aworld_runtime.messages import ToolSpec
from aworld_runtime.tools.base import BaseTool

MAX_LENGTH = 256
"""Characters of an expression."""
MAX_BITS = 4_096
"""Of any whole number on the way to the result: about 1,200 digits."""
MAX_EXPONENT = 4_096
DIGITS = 12
"""Significant digits of a result that isn't whole: hides that 0.1 + 0.2 is 0.30000000000000004."""

ALPHABET = re.compile(r"[0-9.eE_+\-*/%()\s]*")

Number = int | float

SPEC = ToolSpec(
    name="calculator",
    description="Evaluate an arithmetic expression.",
    parameters={
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "for example (2 + 3) * 4"}},
        "required": ["expression"],
        "additionalProperties": False,
    },
)


class Calculator(BaseTool):
    """Evaluates one expression; whole numbers are exact."""

    timeout_s = 5.0

    def get_schema(self) -> ToolSpec:
        """One argument, `expression`."""
        return SPEC

    async def run(self, **arguments: JsonValue) -> JsonValue:
        """The value of `expression`.

        Raises:
            ToolArgumentsError: it isn't a text.
            ToolError: it isn't arithmetic, or has no value of a size that fits.
        """
        expression = arguments.get("expression")
        if not isinstance(expression, str):
            raise ToolArgumentsError(
                f"expression must be a text such as '2 + 3', not {expression!r:.80}"
            )
        return evaluate(expression)


def evaluate(expression: str) -> Number:
    """The value of an arithmetic expression.

    Raises:
        ToolError: not arithmetic, too long, too large, divided by zero.
    """
    if len(expression) > MAX_LENGTH:
        raise ToolError(f"expression has {len(expression)} characters; at most {MAX_LENGTH} fit")
    plain = expression.strip().replace("×", "*").replace("÷", "/").replace("−", "-")
    if "^" in plain:
        raise ToolError("^ is not a power here: write 2 ** 3")
    try:
        tree = ast.parse(plain if ALPHABET.fullmatch(plain) else "", mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise _not_arithmetic(expression) from None
    try:
        return _tidy(_value(tree.body))
    except ZeroDivisionError:
        raise ToolError(f"{expression!r} divides by zero") from None
    except OverflowError:
        raise _too_large() from None


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _bounded(_OPERATIONS[type(op)](_value(left), _value(right)))
        case _:
            raise _not_arithmetic(ast.unparse(node))


def _divide(left: Number, right: Number) -> Number:
    """Whole numbers that divide evenly stay whole and exact."""
    if isinstance(left, int) and isinstance(right, int) and left % right == 0:
        return left // right
    return left / right


def _power(base: Number, exponent: Number) -> Number:
    if abs(exponent) > MAX_EXPONENT:
        raise ToolError(f"exponent {exponent:.6g} is too large; at most {MAX_EXPONENT} is allowed")
    whole = isinstance(base, int) and isinstance(exponent, int) and abs(base) > 1
    if whole and int(base).bit_length() * exponent > 2 * MAX_BITS:
        raise _too_large()
    result: Number | complex = base**exponent
    if isinstance(result, complex):
        raise ToolError(f"{base} ** {exponent} is not a real number")
    return result


_OPERATIONS: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}


def _bounded(number: Number) -> Number:
    if isinstance(number, int):
        too_large = number.bit_length() > MAX_BITS
    else:
        too_large = not math.isfinite(number)
    if too_large:
        raise _too_large()
    return number


def _not_arithmetic(text: str) -> ToolError:
    return ToolError(f"{text!r} is not arithmetic: use numbers, + - * / // % ** and parentheses")


def _too_large() -> ToolError:
    return ToolError(f"the result is too large: at most {MAX_BITS} bits fit")


def _tidy(number: Number) -> Number:
    if isinstance(number, int):
        return number
    rounded = float(f"{number:.{DIGITS}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 10**DIGITS else rounded
