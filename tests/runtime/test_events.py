"""The JSON of every event type, and what decoding refuses.

`golden/` pins the stored form: logs outlive the code that wrote them. A change there counts the type's `schema_version` up
and comes with an upcast; the old golden file moves to `golden/v1`, and test_upcast.py reads it. `python -m tests.runtime.test_events` writes the files that are missing, for a new type.
"""

from __future__ import annotations

import base64
import json
import re
import time
import zlib
from array import array
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import JsonValue

from aworld_runtime.errors import MalformedEventError, PayloadTooLargeError, UnknownEventTypeError
from aworld_runtime.events import (
    COMPRESS_ABOVE,
    REFUSE_ABOVE,
    AnswerProposed,
    AnswerRejected,
    AnswerVerified,
    BatchFormed,
    BreakpointsSet,
    CheckpointSaved,
    ConflictDetected,
    DeliveryDeadLettered,
    DeliveryHandled,
    DuplicateFiltered,
    EpisodeAnswered,
    EpisodeCancelled,
    EpisodeClaimed,
    EpisodeFinished,
    EpisodeForked,
    EpisodePaused,
    EpisodeRequested,
    EpisodeResumed,
    EpisodeStepped,
    EpisodeTakenOver,
    EvaluationFinished,
    Event,
    EventData,
    GroupCompleted,
    GroupRequested,
    HandoffMade,
    HumanAnswered,
    HumanAsked,
    LogRestored,
    MessagePosted,
    ModelCompleted,
    ModelFailed,
    ModelRequested,
    NodeJoined,
    NodeLeft,
    PolicyPublished,
    RecordDropped,
    Registry,
    RewardGiven,
    RunFinished,
    RunStarted,
    RunTakenOver,
    StepFinished,
    SubscriptionChanged,
    TimerFired,
    TimerSet,
    ToolCalled,
    ToolFailed,
    ToolReturned,
    ValueRecorded,
)
from aworld_runtime.messages import (
    Completion,
    Message,
    ModelSpec,
    Task,
    ToolCall,
    ToolSpec,
    Usage,
    VersionSpan,
)

GOLDEN = Path(__file__).parent / "golden"
AT = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
TASK = Task(
    id="sum-1", prompt="What is 47 + 38?", data={"answer": "85"}, environment="calculator:Sums"
)
TOOL = ToolSpec(name="calculator", description="Computes.", parameters={"type": "object"})
CALL = ToolCall(id="call-1", name="calculator", arguments={"expression": "47 + 38"})

SAMPLES: tuple[EventData, ...] = (
    EpisodeRequested(
        task=TASK,
        program="calculator:swarm",
        arguments={"rounds": 2},
        models={
            "solver": ModelSpec(
                model="smollm2", base_url="http://127.0.0.1:8000/v1", policy="policy"
            )
        },
        seed=7,
        index=3,
        code_version="1a2b",
        timeout_s=300.0,
    ),
    EpisodeClaimed(worker="worker/1"),
    EpisodeTakenOver(worker="worker/2"),
    LogRestored(at=12),
    EpisodeForked(parent="episode:1", at=5),
    RecordDropped(seqs=(4, 5)),
    EpisodeAnswered(answer="85", reason="turn_limit"),
    EpisodeFinished(answer="85", reason="failed", error="ToolError: no"),
    EpisodeCancelled(reason="asked to"),
    EpisodePaused(reason="a look at it"),
    EpisodeResumed(reason="it looks fine"),
    EpisodeStepped(count=2),
    BreakpointsSet(breakpoints=("type=tool.called and name=add", "seq>=40")),
    SubscriptionChanged(subscriptions={"verifier": ("answer.", "reward.")}),
    MessagePosted(content="What is 47 + 38? €"),
    ModelRequested(
        model="smollm2",
        prompt_sha256="ab" * 32,
        previous=4,
        sources=(5, 6),
        preamble=(Message(role="system", content="Use the calculator."),),
        tools=(TOOL,),
        temperature=0.5,
        max_tokens=64,
        seed=11,
    ),
    ModelCompleted(
        text="I compute.",
        tool_calls=(CALL,),
        finish_reason="tool_calls",
        usage=Usage(prompt_tokens=20, completion_tokens=4, cost_usd=0.001),
        prompt_offset=12,
        prompt_token_ids=(5, 6),
        token_ids=(1, 2, 49_152),
        behavior_logprobs=(-0.5, -0.25, 0.0),
        version_spans=(VersionSpan(version=3, start=0, end=3),),
    ),
    ModelFailed(error="ModelTimeoutError", message="no answer in 120 s"),
    ToolCalled(call=ToolCall(id="call-2", name="calculator", malformed="{")),
    ToolReturned(name="calculator", content={"value": 85, "exact": True}),
    ToolFailed(name="calculator", error="ToolArgumentsError", message="expression is missing"),
    HandoffMade(target="verifier", reason="check it"),
    AnswerProposed(text="85", reason="token_limit"),
    AnswerVerified(answer="85", detail="computed again"),
    AnswerRejected(answer="84", detail="it is 85"),
    ConflictDetected(roles=("solver", "verifier"), detail="84 or 85"),
    DuplicateFiltered(original=9),
    HumanAsked(question="Go on?"),
    HumanAnswered(answer="yes"),
    RewardGiven(role="solver", reward=0.75, breakdown={"parsed": 0.25, "right": 0.5}),
    TimerSet(name="nudge", at=AT),
    TimerFired(name="nudge"),
    ValueRecorded(kind="random", value=0.25),
    DeliveryHandled(seq=4),
    DeliveryDeadLettered(seq=4, error="ValueError", message="no", attempts=3),
    RunStarted(kind="train", config={"steps": 15}),
    RunTakenOver(node="trainer/2"),
    RunFinished(reason="done", detail="15 steps"),
    NodeJoined(node="worker/1", kind="worker"),
    NodeLeft(node="worker/1", reason="drained"),
    GroupRequested(group="g1", task=TASK, size=8, purpose="evaluate"),
    GroupCompleted(group="g1", episodes=("e1", "e2"), rewards=(0.0, 1.0)),
    BatchFormed(step=3, group_ids=("g1", "g2")),
    StepFinished(
        step=3,
        metrics={"actor/loss": -0.125},
        rows=("00112233445566ff", "8899aabbccddeeff"),
        advantages=(-0.5, 0.5),
        gradient_norms=(0.25, 1.5),
        computed_with={"torch": "2.13.0", "threads": "2"},
    ),
    PolicyPublished(samplers=("sampler/0",)),
    CheckpointSaved(step=3, path="checkpoints/3"),
    EvaluationFinished(step=3, groups=("g9",), metrics={"reward": 0.5}),
)


def at_a_fixed_time(data: EventData) -> Event:
    identity = "01940000-0000-7000-8000-000000000000"
    return Event.of(data, id=identity, time=AT, source="solver/1", episode_id="e1")


ENVELOPE = Event.of(
    MessagePosted(content="All metadata set."),
    id="01940000-0000-7000-8000-000000000001",
    time=AT,
    source="solver/1",
    run_id="r1",
    task_id="sum-1",
    group_id="g1",
    episode_id="e1",
    causation_id="01940000-0000-7000-8000-000000000002",
    correlation_id="01940000-0000-7000-8000-000000000003",
    to="verifier/2",
    attempt=2,
    deadline=AT,
    hops=4,
    trust="model",
    traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    policy="policy",
    policy_version=3,
)
PINNED: Mapping[str, Event] = {
    "envelope": ENVELOPE,
    **{data.type: at_a_fixed_time(data) for data in SAMPLES},
}


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry()


def pretty(body: bytes) -> str:
    return json.dumps(json.loads(body), indent=2, ensure_ascii=False) + "\n"


def built_in_types() -> set[str]:
    return {
        cls.type for cls in EventData.__subclasses__() if cls.__module__ == EventData.__module__
    }


# --- the stored form -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", PINNED)
def test_the_json_of_an_event_is_as_its_golden_file_says(registry: Registry, name: str) -> None:
    golden = (GOLDEN / f"{name}.json").read_text(encoding="utf-8")
    assert pretty(registry.encode(PINNED[name])) == golden


@pytest.mark.parametrize("name", PINNED)
def test_a_golden_file_decodes_to_its_event(registry: Registry, name: str) -> None:
    golden = (GOLDEN / f"{name}.json").read_bytes()
    assert registry.decode(golden, seq=9) == PINNED[name].at(9)


def test_every_built_in_type_has_a_golden_file_and_no_other_file_is_there() -> None:
    assert {path.stem for path in GOLDEN.glob("*.json")} == built_in_types() | {"envelope"}


def test_a_type_that_is_defined_later_is_known_once_an_event_of_it_comes() -> None:
    """A worker imports a program when it claims an episode, long after it has joined the bus."""
    early = Registry()

    class KiteFlown(EventData):
        type = "kite.flown"

    event = Event.of(KiteFlown(), source="user/1")
    assert early.decode(Registry().encode(event)) == event


def test_type_names_are_dotted_and_lower_case() -> None:
    for name in built_in_types():
        assert re.fullmatch(r"[a-z]+\.[a-z_]+", name)


def test_an_event_at_a_prompt_is_what_happened() -> None:
    event = Event.of(MessagePosted(content="Add."), source="swarm/w1", to="solver").at(4)
    assert repr(event) == (
        "Event(seq=4, type='message.posted', role='swarm', to='solver',"
        f" data=MessagePosted(content='Add.'), id={event.id!r})"
    )


def test_seq_is_not_part_of_the_stored_body(registry: Registry) -> None:
    assert registry.encode(ENVELOPE.at(12)) == registry.encode(ENVELOPE)


# --- there and back ------------------------------------------------------------------------------

JSON: st.SearchStrategy[JsonValue] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
OPTIONAL_TEXT = st.none() | st.text()
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=50)
LOGPROBS = st.lists(st.floats(-100, 0, width=32), max_size=50)


@settings(deadline=None)
@given(content=JSON)
def test_a_tool_result_of_any_json_comes_back_as_it_was(content: JsonValue) -> None:
    event = Event.of(ToolReturned(name="any", content=content), source="tool/1")
    assert Registry().decode(Registry().encode(event)) == event


@settings(deadline=None)
@given(
    text=st.text(),
    to=OPTIONAL_TEXT,
    episode_id=OPTIONAL_TEXT,
    hops=st.integers(0, 99),
    deadline=st.none() | st.datetimes(timezones=st.just(UTC)),
    time=st.datetimes(timezones=st.just(UTC)),
)
def test_metadata_comes_back_as_it_was(
    text: str,
    to: str | None,
    episode_id: str | None,
    hops: int,
    deadline: datetime | None,
    time: datetime,
) -> None:
    event = Event.of(
        MessagePosted(content=text),
        source="a/1",
        to=to,
        episode_id=episode_id,
        hops=hops,
        deadline=deadline,
        time=time,
    )
    assert Registry().decode(Registry().encode(event)) == event


@settings(deadline=None)
@given(tokens=TOKENS, logprobs=LOGPROBS)
def test_token_ids_and_logprobs_come_back_exactly(tokens: list[int], logprobs: list[float]) -> None:
    data = ModelCompleted(token_ids=tuple(tokens), behavior_logprobs=tuple(logprobs))
    decoded = Registry().decode(Registry().encode(Event.of(data, source="solver/1"))).data
    assert isinstance(decoded, ModelCompleted)
    assert decoded.token_ids == tuple(tokens)
    assert decoded.behavior_logprobs == tuple(logprobs)


@settings(deadline=None)
@given(
    body=st.binary(max_size=200)
    | st.text().map(str.encode)
    | JSON.map(lambda v: json.dumps(v).encode())
)
def test_whatever_the_bytes_are_decoding_fails_only_with_its_own_errors(body: bytes) -> None:
    with pytest.raises((MalformedEventError, UnknownEventTypeError)):
        Registry().decode(body)


def test_logprobs_are_rounded_to_what_is_stored_when_they_are_made() -> None:
    """So that a run and its record compare equal."""
    [rounded] = ModelCompleted(behavior_logprobs=(-0.1,)).behavior_logprobs
    assert rounded == array("f", [-0.1])[0] != -0.1


def test_tokens_are_stored_as_little_endian_base64(registry: Registry) -> None:
    body = registry.encode(Event.of(ModelCompleted(token_ids=(1, 258)), source="solver/1"))
    stored = json.loads(body)["data"]["token_ids"]
    assert base64.b64decode(stored) == b"\1\0\0\0\2\1\0\0"


def test_a_metric_that_is_no_number_survives(registry: Registry) -> None:
    """A loss of NaN must be readable in the log of the run that it ended."""
    event = Event.of(
        StepFinished(step=1, metrics={"loss": float("nan"), "grad": float("inf")}), source="t/0"
    )
    decoded = registry.decode(registry.encode(event)).data
    assert isinstance(decoded, StepFinished)
    assert decoded.metrics["loss"] != decoded.metrics["loss"]
    assert decoded.metrics["grad"] == float("inf")


def test_a_completion_is_stored_after_the_tokens_it_shares_with_the_previous_one() -> None:
    completion = Completion(
        text="85",
        prompt_token_ids=(1, 2, 3, 4),
        token_ids=(5,),
        behavior_logprobs=(-0.5,),
        policy="p",
    )
    stored = ModelCompleted.of(completion, previous_ids=(1, 2, 3))
    assert (stored.prompt_offset, stored.prompt_token_ids) == (3, (4,))
    assert stored.completion((1, 2, 3), "p") == completion


def test_text_that_utf_8_cannot_hold_is_refused_with_our_own_error(registry: Registry) -> None:
    """Half a surrogate pair, as a model writes it when its output is cut inside an emoji's JSON escape."""
    event = at_a_fixed_time(MessagePosted(content="\ud83d"))
    with pytest.raises(MalformedEventError):
        registry.encode(event)


def nested(depth: int) -> JsonValue:
    value: JsonValue = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("content", [9**9999, nested(200)], ids=["number", "depth"])
def test_what_could_not_be_read_again_is_not_written(
    registry: Registry, content: JsonValue
) -> None:
    event = at_a_fixed_time(ToolReturned(name="power", content=content))
    with pytest.raises(MalformedEventError, match="can't be read again"):
        registry.encode(event)


# --- types ---------------------------------------------------------------------------------------


class ShapeDrawn(EventData):
    """A user's own event type."""

    type = "shape.drawn"
    corners: int


def test_a_users_own_type_decodes_once_it_is_defined(registry: Registry) -> None:
    event = Event.of(ShapeDrawn(corners=3), source="artist/1")
    assert registry.decode(registry.encode(event)) == event


def test_an_unknown_type_is_named(registry: Registry) -> None:
    body = registry.encode(ENVELOPE).replace(b"message.posted", b"never.heard")
    with pytest.raises(UnknownEventTypeError, match=r"'never\.heard'"):
        registry.decode(body)


def test_an_event_that_is_kept_is_the_same_as_one_that_is_placed() -> None:
    placed, kept = ENVELOPE.at(7), ENVELOPE.kept_at(7)
    assert kept == placed
    assert kept.seq == 7
    assert kept.model_dump_json() == placed.model_dump_json()


@pytest.mark.parametrize(
    "fields",
    [
        {"data": {"content": "x", "surprise": 1}},
        {"data": {}},
        {"data": {"content": 1}},
        {"surprise": 1},
        {"trust": "everybody"},
        {"type": ["message.posted"]},
        {"schema_version": "new"},
    ],
)
def test_what_does_not_fit_its_type_is_malformed(
    registry: Registry, fields: dict[str, JsonValue]
) -> None:
    good = json.loads(registry.encode(ENVELOPE))
    with pytest.raises(MalformedEventError):
        registry.decode(json.dumps(good | fields).encode())


# --- size ----------------------------------------------------------------------------------------


def of_size(size: int) -> Event:
    """An event whose JSON has exactly `size` bytes."""
    overhead = len(Registry().encode(at_a_fixed_time(MessagePosted(content=""))))
    return at_a_fixed_time(MessagePosted(content="x" * (size - overhead)))


def test_only_what_is_above_four_kilobytes_is_compressed(registry: Registry) -> None:
    assert registry.encode(of_size(COMPRESS_ABOVE)).startswith(b"{")
    large = of_size(COMPRESS_ABOVE + 1)
    body = registry.encode(large)
    assert body.startswith(b"z")
    assert len(body) < COMPRESS_ABOVE / 10
    assert registry.decode(body) == large


def test_the_largest_event_passes_and_one_byte_more_is_refused(registry: Registry) -> None:
    largest = of_size(REFUSE_ABOVE)
    assert registry.decode(registry.encode(largest)) == largest
    with pytest.raises(PayloadTooLargeError, match=f"message.posted has {REFUSE_ABOVE + 1} bytes"):
        registry.encode(of_size(REFUSE_ABOVE + 1))


def test_a_zip_bomb_is_refused_without_inflating_it(registry: Registry) -> None:
    deflater = zlib.compressobj()
    bomb = b"z" + b"".join(deflater.compress(bytes(2**20)) for _ in range(64)) + deflater.flush()
    assert len(bomb) < 100_000
    with pytest.raises(MalformedEventError, match="more than"):
        registry.decode(bomb)


def test_an_oversized_body_is_refused_before_it_is_parsed(registry: Registry) -> None:
    with pytest.raises(MalformedEventError, match="at most"):
        registry.decode(b'"' + b"x" * REFUSE_ABOVE + b'"')


def test_cut_compressed_content_is_malformed(registry: Registry) -> None:
    with pytest.raises(MalformedEventError, match="cut"):
        registry.decode(registry.encode(of_size(2 * COMPRESS_ABOVE))[:-10])


@pytest.mark.parametrize("place", ["envelope", "data", "call"])
def test_half_a_million_unknown_keys_are_refused_in_a_second_or_two(
    registry: Registry, place: str
) -> None:
    called = ToolCalled(call=ToolCall(id="1", name="n"))
    body = json.loads(registry.encode(at_a_fixed_time(called)))
    inside = {"envelope": body, "data": body["data"], "call": body["data"]["call"]}[place]
    inside |= dict.fromkeys(map(str, range(500_000)), 1)
    hostile = json.dumps(body).encode()
    before = time.process_time()
    with pytest.raises(MalformedEventError, match=r"5000.. of its fields") as caught:
        registry.decode(hostile)
    assert time.process_time() - before < 4.0
    assert len(str(caught.value)) < 200


def test_deep_nesting_is_malformed_and_not_a_crash(registry: Registry) -> None:
    good = registry.encode(at_a_fixed_time(ToolReturned(name="deep", content="HERE")))
    with pytest.raises(MalformedEventError):
        registry.decode(good.replace(b'"HERE"', b"[" * 100_000 + b"]" * 100_000))


if __name__ == "__main__":
    for name, event in PINNED.items():
        path = GOLDEN / f"{name}.json"
        if not path.exists():
            path.write_text(pretty(Registry().encode(event)), encoding="utf-8")
