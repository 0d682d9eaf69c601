"""Predicates on events: what they say, what they find, and what they refuse."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aworld_runtime.errors import PredicateError
from aworld_runtime.events import Event, EventData, ModelCompleted, ToolCalled, ToolReturned
from aworld_runtime.messages import ToolCall
from aworld_runtime.predicate import DEEPEST, LONGEST, Comparison, Many, Not, Predicate, Term

CALL = ToolCall(id="c1", name="calculator", arguments={"expression": "17 * 23", "digits": 2})
CALLED = Event.of(ToolCalled(call=CALL), source="solver/1", to="calculator", hops=3).at(12)


def holds(text: str, data: EventData | None = None) -> bool:
    event = CALLED if data is None else Event.of(data, source="solver/1")
    return Predicate.parse(text).matches(event)


@pytest.mark.parametrize(
    "text",
    [
        "tool.called",
        "type=tool.called and data.name=calculator",
        "name=calculator",
        "data.call.arguments.digits=2",
        'expression="17 * 23"',
        "expression ~ '* 23'",
        "seq>=12 and seq < 13",
        "hops>2 and hops<1e1",
        "not name=search",
        "name!=search and nothing!=there",
        "role=judge or role=solver and to=calculator",
        "(role=judge or role=solver) and not (seq=1 or seq=2)",
        "policy=null",
    ],
)
def test_a_predicate_that_holds(text: str) -> None:
    assert holds(text)


@pytest.mark.parametrize(
    "text",
    [
        "tool.returned",
        "type=tool.returned or name=search",
        "nothing=there",
        "nothing<1",
        "hops<10 and hops>9",
        "role=solver and not to=calculator",
        "(role=solver or role=judge) and seq=1",
    ],
)
def test_a_predicate_that_does_not(text: str) -> None:
    assert not holds(text)


def test_of_several_values_one_that_fits_is_enough() -> None:
    calls = (CALL, CALL.model_copy(update={"name": "search"}))
    asked = ModelCompleted(tool_calls=calls, finish_reason="tool_calls")
    assert holds("tool_calls.name=calculator", asked)
    assert holds("name=search", asked)
    assert not holds("name!=search", asked)


def test_values_are_numbers_where_both_are_and_text_where_not() -> None:
    assert holds("content>9", ToolReturned(name="add", content=10))
    assert holds("content=10.0", ToolReturned(name="add", content="10"))
    assert holds("content=true", ToolReturned(name="add", content=True))
    assert not holds("content=1", ToolReturned(name="add", content=True))
    assert holds("content~b", ToolReturned(name="add", content=["a", "b"]))


def test_an_event_that_no_log_can_hold_fits_none() -> None:
    assert not holds("content~1", ToolReturned(name="add", content=10**5000))


@pytest.mark.parametrize(
    "text, told",
    [
        ("", "at character 1: expected a field"),
        ("role", "at character 5: expected = != < <= > >= or ~"),
        ("role=", "at character 6: expected a value"),
        ("role=solver judge", "at character 13: expected and, or, or the end, not 'judge'"),
        ("role=solver and", "at character 16: expected a field"),
        ("(role=solver", "at character 13: expected )"),
        ('role="solver', "at character 6: a quote that isn't closed"),
        ("role=not", "at character 6: expected a value"),
        (".role=1", "at character 1: expected a field"),
        ("role !x", "at character 6: expected = != < <= > >= or ~, not '!x'"),
        ("role == x", "at character 7: expected a value"),
    ],
)
def test_what_is_no_predicate_is_refused_with_the_place(text: str, told: str) -> None:
    with pytest.raises(PredicateError) as refusal:
        Predicate.parse(text)
    assert told in str(refusal.value)


@pytest.mark.parametrize(
    "text",
    [
        "(" * 2000 + "a=1" + ")" * 2000,
        "not " * 1000 + "a=1",
        "a=" + "x" * LONGEST,
        "(" * LONGEST,
        "(" * (DEEPEST + 1),
    ],
)
def test_a_hostile_one_is_refused_too(text: str) -> None:
    with pytest.raises(PredicateError) as refusal:
        Predicate.parse(text)
    assert len(str(refusal.value)) < 500


def test_a_long_one_that_is_not_deep_is_read() -> None:
    assert holds(" or ".join(["seq=1"] * 400 + ["seq=12"]))


WORD = st.text("abz_9", min_size=1, max_size=4).filter(
    lambda word: word not in {"and", "or", "not"}
)
COMPARISON = st.builds(
    Comparison,
    st.lists(WORD, min_size=1, max_size=3).map(".".join),
    st.sampled_from(["=", "!=", "<", "<=", ">", ">=", "~"]),
    st.text(max_size=8) | st.sampled_from(["and", "not", "'", '"', "\\", "a b", "!=", "", "x!"]),
)
TERM: st.SearchStrategy[Term] = st.recursive(
    COMPARISON,
    lambda inner: (
        st.builds(Not, inner)
        | st.builds(
            Many, st.sampled_from(["and", "or"]), st.lists(inner, min_size=2, max_size=3).map(tuple)
        )
    ),
    max_leaves=12,
)


@given(TERM)
def test_what_is_written_reads_the_same(term: Term) -> None:
    assert Predicate.parse(str(Predicate(term))) == Predicate(term)


@given(st.text(alphabet="ab.=!<>~()'\"\\ andortn", max_size=40) | st.text(max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        predicate = Predicate.parse(text)
    except PredicateError:
        return
    predicate.matches(CALLED)
    assert Predicate.parse(str(predicate)) == predicate


def test_as_deep_as_it_may_be() -> None:
    assert holds("(" * DEEPEST + "seq=12" + ")" * DEEPEST)
