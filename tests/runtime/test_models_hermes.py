"""Tool calls written as text."""

import json

from hypothesis import given
from hypothesis import strategies as st

from aworld_runtime.messages import Message, ToolCall, ToolSpec
from aworld_runtime.models.hermes import parse, render_tools, write

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "2 + 3"}}</tool_call>'


def test_call_and_the_words_around_it() -> None:
    words, calls = parse(f"Let me see.\n{CALL}\nOne moment.", id_prefix="c")
    assert words == "Let me see.\n\nOne moment."
    assert calls == (ToolCall(id="c0", name="calculator", arguments={"expression": "2 + 3"}),)


def test_text_without_a_call_is_left_alone() -> None:
    assert parse(" <answer>5</answer>\n") == (" <answer>5</answer>\n", ())


def test_calls_in_parallel_and_one_never_closed() -> None:
    words, calls = parse(
        f'{CALL}<tool_call>\n{{"name": "now"}}\n<tool_call>{{"name": "x"', id_prefix="c"
    )
    assert words == ""
    assert [(call.id, call.name, call.malformed) for call in calls] == [
        ("c0", "calculator", None),
        ("c1", "now", None),
        ("c2", "x", '{"name": "x"'),
    ]


def test_arguments_as_text_are_read_too() -> None:
    _, calls = parse('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>')
    assert calls[0].arguments == {"a": 1}


def test_what_no_log_could_hold_is_malformed() -> None:
    for arguments in (
        '{"a": NaN}',
        '{"a": 1e999}',
        '{"a": "\\ud800"}',
        "[1]",
        '{"a": ' + "[" * 9999,
        '{"a": ' + "[" * 196 + "]" * 196 + "}",
        '{"a": ' + "9" * 5000 + "}",
    ):
        _, calls = parse(f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>')
        assert calls[0].malformed is not None
        assert calls[0].name == "f"
        assert calls[0].arguments == {}


def test_write_is_the_reverse_of_parse() -> None:
    words, calls = parse(f"First.\n{CALL}")
    assert write(Message(role="assistant", content=words, tool_calls=calls)) == f"First.\n{CALL}"
    _, broken = parse("<tool_call>{oops</tool_call>")
    text = write(Message(role="assistant", tool_calls=broken))
    assert text == "<tool_call>{oops</tool_call>"


def test_tools_are_described_for_a_system_prompt() -> None:
    text = render_tools([ToolSpec(name="calculator", description="Does sums.")])
    described = json.loads(text.split("<tools>\n")[1].split("\n</tools>")[0])
    assert described["name"] == "calculator"
    assert render_tools([]) == ""


PIECES = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        '{"name": "f"',
        ', "arguments": {',
        '"a": 1',
        "}",
        "}}",
        "é",
        "\n",
    ]
)


@given(st.lists(PIECES, max_size=12).map("".join))
def test_any_text_is_read_and_every_call_can_be_logged(text: str) -> None:
    words, calls = parse(text)
    assert "<tool_call>" not in words
    for call in calls:
        assert ToolCall.model_validate_json(call.model_dump_json()) == call
