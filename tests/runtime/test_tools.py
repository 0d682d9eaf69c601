"""Tools: the calculator, functions as tools, names, and what `call` guards against."""

import asyncio
import contextlib
import sys
import threading
from typing import Annotated, Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, JsonValue

from aworld_runtime.errors import (
    ToolArgumentsError,
    ToolError,
    ToolTimeoutError,
    UnknownToolError,
)
from aworld_runtime.messages import ToolSpec
from aworld_runtime.tools import BaseTool, Calculator, call_id, resolve, tool
from aworld_runtime.tools.calculator import evaluate
from aworld_runtime.tools.call import MAX_OUTPUT, call

# --- the calculator --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "expression, value",
    [
        ("47 + 38", 85),
        (" (2+3)*4 ", 20),
        ("-2 ** 2", -4),
        ("7 // 2 + 7 % 2", 4),
        ("6 / 2", 3),
        ("2 ** 100", 2**100),
        ("10 ** 40 / 10 ** 38", 100),
        ("0.1 + 0.2", 0.3),
        ("1 / 4", 0.25),
        ("2 ** -1", 0.5),
        ("3 × 4 ÷ 2 − 1", 5),
        ("1e3", 1000),
    ],
)
def test_calculator_evaluates(expression: str, value: float) -> None:
    assert evaluate(expression) == value
    assert type(evaluate(expression)) is type(value)


@pytest.mark.parametrize(
    "expression, why",
    [
        ("", "not arithmetic"),
        ("2 +", "not arithmetic"),
        ("__import__('os').system('x')", "not arithmetic"),
        ("(1).real", "not arithmetic"),
        ("e + 1", "'e' is not arithmetic"),
        ("1, 2", "not arithmetic"),
        ("1 / 0", "divides by zero"),
        ("2 ^ 3", r"write 2 \*\* 3"),
        ("9 ** 9 ** 9", "exponent"),
        ("2 ** 99999", "exponent 99999 is too large"),
        ("(2 ** 4000) * (2 ** 4000)", "too large"),
        ("10.0 ** 400", "too large"),
        ("1e999", "too large"),
        ("(-8) ** 0.5", "not a real number"),
        ("1" * 300, "300 characters"),
    ],
)
def test_calculator_refuses(expression: str, why: str) -> None:
    with pytest.raises(ToolError, match=why):
        evaluate(expression)


@given(st.text(alphabet="0123456789+-*/%(). e_^", max_size=40))
def test_calculator_answers_or_refuses_any_text(expression: str) -> None:
    with contextlib.suppress(ToolError):
        assert isinstance(evaluate(expression), int | float)


@given(st.integers(-999, 999), st.integers(-999, 999))
def test_calculator_agrees_with_python(left: int, right: int) -> None:
    assert evaluate(f"{left} + {right} * ({left} - {right})") == left + right * (left - right)


async def test_calculator_wants_a_text() -> None:
    with pytest.raises(ToolArgumentsError, match="expression must be a text"):
        await Calculator().run(expression=5)


# --- functions -------------------------------------------------------------------------------------


class Point(BaseModel):
    x: int
    y: int = 0


@tool
async def distance(point: Point, scale: Annotated[float, Field(gt=0)] = 1.0) -> float:
    """Distance from the origin,
    in steps.

    Args:
        point: Where to
            measure from.
        scale: Steps per unit.

    Returns:
        The distance.
    """
    return scale * (abs(point.x) + abs(point.y))


def test_schema_comes_from_hints_and_docstring() -> None:
    spec = distance.get_schema()
    assert spec.name == "distance"
    assert spec.description == "Distance from the origin, in steps."
    properties: Any = spec.parameters["properties"]
    assert properties["point"]["description"] == "Where to measure from."
    assert properties["scale"] == {
        "default": 1.0,
        "description": "Steps per unit.",
        "exclusiveMinimum": 0,
        "type": "number",
    }
    assert spec.parameters["required"] == ["point"]


def test_a_function_tool_shows_how_it_is_called() -> None:
    assert repr(distance) == "<tool distance(point, scale)>"


async def test_function_gets_typed_arguments() -> None:
    assert await call(distance, {"point": {"x": 3, "y": "-4"}, "scale": 2}) == 14.0


@pytest.mark.parametrize(
    "arguments, why",
    [
        ({}, "missing argument point"),
        ({"point": {"x": 1}, "sclae": 2}, "unknown argument sclae; it takes point, scale"),
        ({"point": {"x": "much"}}, r"point\.x: Input should be a valid integer"),
        ({"point": {"x": 1}, "scale": 0}, "scale: Input should be greater than 0"),
    ],
)
async def test_wrong_arguments_are_named(arguments: dict[str, JsonValue], why: str) -> None:
    with pytest.raises(ToolArgumentsError, match=why):
        await call(distance, arguments)


async def test_plain_function_runs_in_a_thread() -> None:
    @tool(name="where", description="Which thread.")
    def thread_id() -> int:
        return threading.get_ident()

    assert thread_id.get_schema().description == "Which thread."
    assert await call(thread_id, {}) != threading.get_ident()
    assert thread_id() == threading.get_ident()


async def test_a_tool_may_change_its_arguments_and_nobody_elses() -> None:
    class Sorter(BaseTool):
        def get_schema(self) -> ToolSpec:
            return ToolSpec(name="sorter")

        async def run(self, **arguments: JsonValue) -> JsonValue:
            numbers = arguments["numbers"]
            assert isinstance(numbers, list)
            numbers.sort(key=str)
            return numbers

    asked: dict[str, JsonValue] = {"numbers": [3, 1, 2]}
    assert await call(Sorter(), asked) == [1, 2, 3]
    assert asked == {"numbers": [3, 1, 2]}


async def test_a_tool_knows_the_id_of_its_call() -> None:
    @tool
    def plain() -> str:
        """In a thread."""
        return call_id()

    @tool
    async def coroutine() -> str:
        """In the caller's task."""
        return call_id()

    for one in (plain, coroutine):
        assert await call(one, {}, key="event-7") == "event-7"
    assert call_id() == ""


async def test_result_may_be_a_model_but_not_an_object() -> None:
    @tool
    def shift(point: Point) -> Point:
        """Move it."""
        return Point(x=point.x + 1, y=point.y)

    @tool
    def thing() -> object:
        return object()

    assert await call(shift, {"point": {"x": 1}}) == {"x": 2, "y": 0}
    with pytest.raises(ToolError, match="thing returned a object"):
        await call(thing, {})


def test_function_that_no_json_can_call_is_refused() -> None:
    def many(*numbers: int) -> int:
        return sum(numbers)

    def odd(lock: threading.Event) -> None:
        lock.set()

    with pytest.raises(ToolError, match=r"parameter \*numbers.* has no name"):
        tool(many)
    with pytest.raises(ToolError, match="'odd'"):
        tool(odd)


# --- names -----------------------------------------------------------------------------------------


def double(number: int) -> int:
    """Twice the number."""
    return 2 * number


def test_tools_resolve_from_names_functions_classes_and_tools() -> None:
    assert list(resolve(["calculator", double, distance])) == ["calculator", "double", "distance"]
    assert isinstance(resolve([Calculator])["calculator"], Calculator)


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownToolError, match="unknown tool 'calcluator'; known: calculator"):
        resolve(["calcluator"])


def test_two_tools_may_not_share_a_name() -> None:
    with pytest.raises(ToolError, match="two tools are called 'calculator'"):
        resolve(["calculator", Calculator()])


# --- call ------------------------------------------------------------------------------------------


class Probe(BaseTool):
    """Does what its argument says."""

    timeout_s = 0.02

    def get_schema(self) -> ToolSpec:
        return ToolSpec(name="probe")

    async def run(self, **arguments: JsonValue) -> JsonValue:
        match arguments:
            case {"hang": _}:
                await anyio.sleep_forever()
            case {"fail": message}:
                raise KeyError(message)
            case {"size": int() as size}:
                return "é" * size
            case {"count": int() as count}:
                return list(range(count))
            case {"nan": _}:
                return [float("nan")]
            case _:
                pass
        return "done"


async def test_slow_tool_times_out() -> None:
    with pytest.raises(ToolTimeoutError, match=r"probe did not answer within 0\.02 s"):
        await call(Probe(), {"hang": True})


async def test_failure_is_told_with_its_type() -> None:
    with pytest.raises(ToolError, match="KeyError: 'no such row'"):
        await call(Probe(), {"fail": "no such row"})


async def leave_async() -> None:
    """As code that a command line calls does."""
    sys.exit(3)


def leave_in_a_thread() -> None:
    """The same, off the event loop."""
    sys.exit(3)


@pytest.mark.parametrize("leave", [leave_async, leave_in_a_thread])
async def test_a_tool_that_exits_has_failed_and_ends_nothing_else(leave: Any) -> None:
    with pytest.raises(ToolError, match="SystemExit: 3"):
        await call(tool(leave), {})


async def test_flood_keeps_head_and_tail_and_says_what_was_cut() -> None:
    flood = await call(Probe(), {"size": MAX_OUTPUT})
    assert isinstance(flood, str)
    assert len(flood.encode()) < MAX_OUTPUT + 100
    assert flood.startswith("é")
    assert flood.endswith("é")
    assert f"of {2 * MAX_OUTPUT} bytes cut" in flood


async def test_large_structure_becomes_cut_text() -> None:
    assert await call(Probe(), {"count": 3}) == [0, 1, 2]
    flood = await call(Probe(), {"count": 20_000})
    assert isinstance(flood, str)
    assert flood.startswith("[0, 1, 2,")
    assert flood.endswith("19999]")


async def test_result_that_is_no_json_is_an_error() -> None:
    with pytest.raises(ToolError, match="probe returned a list that can't be written as JSON"):
        await call(Probe(), {"nan": True})


def nested(depth: int) -> JsonValue:
    value: JsonValue = 1
    for _ in range(depth):
        value = [value]
    return value


class Returning(BaseTool):
    """Returns what it was made with, without a look at it."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def get_schema(self) -> ToolSpec:
        return ToolSpec(name="returning")

    async def run(self, **arguments: JsonValue) -> JsonValue:  # noqa: ARG002 - BaseTool's signature
        return self.result


@pytest.mark.parametrize(
    "result, read",
    [
        ("a\ud800", "a?"),
        ({"\ud800": 1}, '{"?": 1}'),
        ({1: (2, 3)}, {"1": [2, 3]}),
        (2**64, 2**64),
        (True, True),
        (None, None),
    ],
)
async def test_a_result_is_what_a_log_can_hold(result: Any, read: JsonValue) -> None:
    assert await call(Returning(result), {}) == read


@pytest.mark.parametrize(
    "result",
    [10**5000, {"n": 10**5000}, nested(199), nested(3000), b"\xff"],
    ids=["digits", "digits inside", "deep", "deeper", "bytes"],
)
async def test_a_result_that_no_log_can_hold_is_an_error(result: Any) -> None:
    with pytest.raises(ToolError, match="that can't be written as JSON"):
        await call(Returning(result), {})


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    "error, said",
    [
        (ValueError("a\ud800"), "ValueError: a?"),
        (MuteError(), "MuteError: no message, its __str__ raised RuntimeError"),
    ],
)
async def test_whatever_a_tool_raises_can_be_told(error: Exception, said: str) -> None:
    @tool(name="failing", description="Fails.")
    def failing() -> None:
        raise error

    with pytest.raises(ToolError) as raised:
        await call(failing, {})
    assert str(raised.value) == said


async def test_a_tool_that_cancels_itself_has_failed() -> None:
    @tool(name="cancelling", description="Awaits what was cancelled.")
    async def cancelling() -> None:
        raise asyncio.CancelledError

    with pytest.raises(ToolError, match="CancelledError: the tool cancelled itself"):
        await call(cancelling, {})


async def test_a_call_that_is_cancelled_ends_as_cancelled() -> None:
    """By a scope, or as the end of an event loop does it."""
    with anyio.move_on_after(0) as scope:
        await call(Probe(), {"hang": True})
    assert scope.cancelled_caught
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await call(Probe(), {"hang": True})
