"""What a person sees of a run while it trains."""

import io
from typing import Literal

from aworld_runtime.events import (
    BatchFormed,
    EpisodeFinished,
    EvaluationFinished,
    Event,
    EventData,
    GroupRequested,
    RunFinished,
    StepFinished,
)
from aworld_runtime.messages import Task
from aworld_runtime.training.progress import CLEAR, Progress

TIMES = {"perf/generate_s": 4.0, "perf/train_s": 20.0, "perf/publish_s": 1.0, "perf/step_s": 25.0}


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def follow(progress: Progress, *data: EventData) -> None:
    for one in data:
        progress.follow(Event.of(one, source="trainer/1", group_id="g"))


def group(
    size: int = 2, name: str = "g", purpose: Literal["train", "evaluate"] = "train"
) -> GroupRequested:
    return GroupRequested(group=name, task=Task(id="t", prompt="?"), size=size, purpose=purpose)


def finished(step: int) -> StepFinished:
    return StepFinished(step=step, metrics={"reward/mean": 0.25, **TIMES})


def test_plain_lines_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    with Progress(20, out) as progress:
        evaluation = {"reward/mean": 0.1, "episodes": 32.0, "perf/evaluate_s": 6.0}
        follow(progress, EvaluationFinished(step=0, groups=(), metrics=evaluation))
        follow(progress, group(), EpisodeFinished(), BatchFormed(step=1, group_ids=()), finished(1))
        follow(progress, RunFinished(reason="done", detail="20 steps"))
    assert out.getvalue().splitlines() == [
        "held-out before training: reward 0.100 #.........  32 episodes, 6.0 s",
        "step  1/20  reward 0.250 ##........  25.0 s (generate 4.0, train 20.0, publish 1.0)  7:55 left",
        "run finished: done (20 steps)",
    ]


def test_long_silence_is_broken_when_a_phase_begins() -> None:
    now = 0.0
    out = io.StringIO()
    progress = Progress(20, out, clock=lambda: now)
    follow(progress, group())
    assert out.getvalue() == ""
    now = 21.0
    follow(progress, BatchFormed(step=1, group_ids=("g",)))
    assert out.getvalue() == "step 1/20: train\n"


def test_long_sampling_says_now_and_then_how_many_episodes_are_there() -> None:
    now = 0.0
    out = io.StringIO()
    progress = Progress(20, out, clock=lambda: now)
    follow(progress, group(40, purpose="evaluate"))
    for _ in range(30):
        now += 1
        follow(progress, EpisodeFinished())
    follow(progress, EpisodeFinished(reason="failed"))  # is tried again
    follow(progress, EvaluationFinished(step=0, groups=("g",), metrics={}))
    follow(progress, group(40), group(40, "next"))
    for _ in range(22):
        now += 1
        follow(progress, EpisodeFinished())
    lines = out.getvalue().splitlines()
    assert lines[0] == "before training: evaluate 21/40 episodes"
    assert lines[1].startswith("held-out before training")
    assert lines[2:] == ["step 1/20: generate 21/80 episodes"]


def test_time_left_counts_the_evaluations_to_come() -> None:
    out = io.StringIO()
    progress = Progress(4, out, evaluate_every=2)
    metrics = {"perf/evaluate_s": 60.0}
    follow(progress, EvaluationFinished(step=0, groups=(), metrics=metrics), finished(1))
    follow(progress, finished(2), EvaluationFinished(step=2, groups=(), metrics=metrics))
    follow(progress, finished(3), finished(4))
    left = [line.rpartition("  ")[2] for line in out.getvalue().splitlines() if "(gen" in line]
    assert left == ["3:15 left", "2:50 left", "1:25 left", "1:00 left"]


def test_terminal_has_a_status_line_below_what_was_said() -> None:
    out = Terminal()
    with Progress(4, out) as progress:
        follow(progress, finished(1), group(3), EpisodeFinished())
        assert (
            progress.status
            == "███░░░░░░░░░ step 1/4 · generate 1/3 episodes · reward 0.250 · 1:15 left"
        )
        progress.say("hello")
        assert f"{CLEAR}hello\n{CLEAR}███░" in out.getvalue()
    assert out.getvalue().endswith(CLEAR)
