"""What a person sees of a run while it trains."""

import io

from aworld_runtime.events import (
    BatchFormed,
    EpisodeFinished,
    EvaluationFinished,
    Event,
    EventData,
    GroupRequested,
    PolicyPublished,
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
        progress.follow(Event.of(one, source="trainer/1"))


def group(size: int = 2) -> GroupRequested:
    return GroupRequested(group="g", task=Task(id="t", prompt="?"), size=size)


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
    now = 11.0
    follow(progress, BatchFormed(step=1, group_ids=()))
    assert out.getvalue() == "step 1/20: train\n"


def test_terminal_has_a_status_line_below_what_was_said() -> None:
    out = Terminal()
    with Progress(4, out) as progress:
        follow(progress, finished(1), group(3), EpisodeFinished())
        assert (
            progress.status
            == "█████░░░░░░░░░░░░░░░ step 1/4 · generate 1/3 · reward 0.250 · 1:15 left"
        )
        follow(progress, PolicyPublished(samplers=("s",)))
        progress.say("hello")
        assert f"{CLEAR}hello\n{CLEAR}█████░" in out.getvalue()
    assert out.getvalue().endswith(CLEAR)
