"""The report of a run: what is on the page, and that it needs nothing else."""

import math
import re
from xml.etree import ElementTree as ET

import pytest

from aworld_runtime.messages import Completion, Message, Task, ToolCall
from aworld_runtime.training.charts import lines_svg, phase_bars_svg, reward_curve_svg
from aworld_runtime.training.report import (
    HeldOut,
    RunReport,
    StepRow,
    Totals,
    choose_examples,
    render,
)
from aworld_runtime.trajectory import Episode, Trajectory, Turn


def episode(number: int, text: str, reward: float, *, run: str = "b") -> Episode:
    call = ToolCall(id="c", name="calculator", arguments={"expression": "47 + 38"})
    opening = (
        Message(role="system", content="Use the calculator."),
        Message(role="user", content="What is 52 - 17?"),
        Message(role="assistant", content="<answer>35</answer>"),
        Message(role="user", content=f"What is {number} + 38?"),
    )
    result = Message(role="tool", content="85", name="calculator", tool_call_id="c")
    turns = (
        Turn(seq=3, new_messages=opening, completion=Completion(tool_calls=(call,))),
        Turn(seq=6, new_messages=(result,), completion=Completion(text=text)),
    )
    breakdown = {"call_parsed": 0.2, "right_answer": max(0.0, reward - 0.2)}
    trajectory = Trajectory(role="solver", turns=turns, reward=reward, breakdown=breakdown)
    task = Task(id=f"calculator:{number}+38", prompt="?")
    return Episode(
        id=f"{run}.{number}",
        task=task,
        reason="answered",
        reward=reward,
        trajectories=(trajectory,),
    )


def sample(steps: int = 15) -> RunReport:
    """A run as it comes out, with made-up numbers."""

    def metrics(step: int) -> dict[str, float]:
        learned = 1 / (1 + math.exp(5 - step))
        reward = 0.2 + 0.78 * learned
        return {
            "reward/mean": reward,
            "reward/max": 1.0,
            "reward/call_parsed": 0.05 + 0.15 * learned,
            "reward/right_expression": 0.06 + 0.23 * learned,
            "reward/answer_tag": 0.03 + 0.07 * learned,
            "reward/right_answer": 0.06 + 0.33 * learned,
            "actor/loss": 0.01 / step,
            "actor/kl": 0.001 * step,
            "actor/entropy": 1.4 / step,
            "rollout/num_turns": 1.5 + 0.5 * learned,
            "rollout/response_length": 50 - 8 * learned,
            "perf/generate_s": 8 - 4 * learned,
            "perf/train_s": 26 - 12 * learned,
            "perf/publish_s": 0.9,
            "perf/rest_s": 0.6,
            "perf/step_s": 35.5 - 16 * learned,
        }

    rows = tuple(StepRow(step=step, metrics=metrics(step)) for step in range(1, steps + 1))
    held_out = [(0, 0.21), (5, 0.55), (10, 0.96), (15, 1.0)]
    wild = "<b>47</b> + 38 = 99 & more words " * 8
    return RunReport(
        run_id="20260101-120000-abcdef",
        task="calculator",
        status="done",
        model="SmolLM2-135M-Instruct",
        sampler="vllm",
        workers=4,
        seconds=420.0,
        config={"task": "calculator", "steps": steps, "learner": {"lr": 1e-5}},
        steps=rows,
        held_out=tuple(
            HeldOut(step=step, reward=reward, episodes=32, seconds=6.0) for step, reward in held_out
        ),
        examples=choose_examples(
            [episode(47, wild, 0.2), episode(48, wild, 0.2), episode(49, wild, 0.6)],
            [
                episode(47, "<answer>85</answer>", 1.0, run="a"),
                episode(48, "<answer>86</answer>", 1.0, run="a"),
                episode(49, "I don't know.", 0.2, run="a"),
            ],
            role="solver",
            steps=(0, 15),
        ),
        totals=Totals(
            episodes=608, prompt_tokens=171_000, sampled_tokens=31_234, tool_calls=540, takeovers=1
        ),
        provenance={"commit": "abc123", "python": "3.11.9", "cores": 2, "packages": ["a==1"]},
    )


def test_report_is_one_page_that_needs_nothing_else() -> None:
    page = render(sample())
    assert page.startswith("<!doctype html>")
    assert "<script" not in page
    assert re.findall(r'(?:src|href)="', page) == []
    assert re.findall(r"url\(|@import", page) == []
    assert re.findall(r"https?://", page.replace("http://www.w3.org/2000/svg", "")) == []


def test_page_says_what_happened() -> None:
    page = render(sample())
    for text in ("0.21 → 1.00", "608", "31,234", "before training", "after step 15", "abc123"):
        assert text in page


def test_what_a_model_wrote_cannot_break_the_page() -> None:
    page = render(sample())
    assert "<b>47</b>" not in page
    assert "&lt;b&gt;47&lt;/b&gt; + 38 = 99 &amp; more" in page


def test_worst_example_after_training_is_shown_too() -> None:
    shown = [(example.task_id, example.when) for example in sample().examples]
    assert shown == [
        (f"calculator:{number}+38", when) for number in (47, 48, 49) for when in ("before", "after")
    ]
    first = sample().examples[0]
    assert [message.role for message in first.preamble] == ["system", "user", "assistant"]
    assert first.messages[0].content == "What is 47 + 38?"


def test_report_round_trips_as_json() -> None:
    run = sample()
    assert RunReport.model_validate_json(run.model_dump_json()) == run


def test_run_that_stopped_at_once_has_a_report_too() -> None:
    run = sample().model_copy(
        update={"steps": (), "held_out": (), "examples": (), "status": "failed: no bus"}
    )
    page = render(run)
    assert "failed: no bus" in page
    assert "No held-out episode was kept." in page


@pytest.mark.parametrize(
    "svg",
    [
        reward_curve_svg(*sample().reward_curve, standalone=True),
        reward_curve_svg([], []),
        reward_curve_svg([(1, 0.5)], [(0, -2.0)]),
        reward_curve_svg([(step, step / 1000) for step in range(1000)], [(3, float("nan"))]),
        lines_svg({"a & b": [(1, 3.5), (2, float("inf"))]}, "two"),
        phase_bars_svg([], "none"),
        phase_bars_svg([(step, {"train": 1.0, "rest": 0.0}) for step in range(500)], "many"),
    ],
)
def test_charts_are_well_formed_and_hold_no_nonsense(svg: str) -> None:
    root = ET.fromstring(svg)  # noqa: S314 - our own text
    assert root.tag.endswith("svg")
    assert "nan" not in svg
    assert "inf" not in svg.replace("held-out", "")
    assert len(svg) < 60_000


def test_curve_ends_where_the_numbers_do() -> None:
    svg = reward_curve_svg([(1, 0.0), (2, 1.0)], [])
    points = re.findall(r'points="([^"]*)"', svg)[0].split()
    (x1, y1), (x2, y2) = (map(float, point.split(",")) for point in points)
    assert x1 < x2
    assert y1 > y2
