"""A training run's progress in the terminal, read off the run's log.

On a terminal, finished steps scroll by above a status line that is drawn again and again; anywhere
else there are plain lines only, and in a long silence one that says how many episodes are there.
Times come from the log, so a resumed run shows the same lines.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self, TextIO

from aworld_runtime.events import (
    FAILURES,
    BatchFormed,
    CheckpointSaved,
    EpisodeFinished,
    EvaluationFinished,
    Event,
    GroupCompleted,
    GroupRequested,
    RunFinished,
    RunTakenOver,
    StepFinished,
)

BAR = 12
"""Characters of the run's bar: the whole status line has room in 80 columns."""
REWARD_BAR = 10
REDRAW_S = 0.1
QUIET_S = 20.0
"""Without a terminal, seconds of silence after which the next news gets a line of its own."""
PHASES = ("generate", "train", "publish")
CLEAR = "\r\x1b[2K"


@dataclass
class Asked:
    """A group that no batch or evaluation has used."""

    purpose: Literal["train", "evaluate"]
    size: int
    there: int = 0
    """Its episodes that have ended and count."""


class Progress:
    """Shows lines that it is told, and what the log says."""

    def __init__(
        self,
        steps: int,
        out: TextIO = sys.stdout,
        *,
        evaluate_every: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steps = steps
        self._evaluate_every = evaluate_every
        self._out = out
        self._clock = clock
        self._live = False
        self._fancy = "utf" in (getattr(out, "encoding", None) or "").lower()
        self._drawn_at = self._said_at = clock()
        self._step = 0
        self._reward: float | None = None
        self._seconds: list[float] = []
        self._evaluated = -1
        self._evaluation_s = 0.0
        self._phase = "starting"
        self._asked: dict[str, Asked] = {}

    def __enter__(self) -> Self:
        """Begin to draw the status line, where the output is a terminal."""
        self._live = self._out.isatty()
        self._draw()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Take the status line away."""
        if self._live:
            self._out.write(CLEAR)
            self._out.flush()
        self._live = False

    def say(self, line: str) -> None:
        """Show a line for good."""
        self._out.write(f"{CLEAR if self._live else ''}{line}\n")
        self._said_at = self._clock()
        self._draw()
        self._out.flush()

    def follow(self, event: Event) -> None:
        """Take the next event of the run's log."""
        match event.data:
            case StepFinished(step=step, metrics=metrics):
                self._finish_step(step, metrics)
            case EvaluationFinished(step=step, groups=groups, metrics=metrics):
                self._use(groups)
                self._finish_evaluation(step, metrics)
            case GroupRequested(group=group, size=size, purpose=purpose):
                self._asked[group] = Asked(purpose, size)
                self._begin("evaluate" if purpose == "evaluate" else "generate")
            case EpisodeFinished(reason=reason) if reason not in FAILURES:
                if (asked := self._asked.get(event.group_id or "")) is not None:
                    asked.there += 1
                self._news()
            case GroupCompleted(group=group, episodes=()):
                self._asked.pop(group, None)
            case BatchFormed(group_ids=groups):
                self._use(groups)
                self._begin("train")
            case CheckpointSaved(step=step):
                self.say(f"checkpoint after step {step}")
            case RunTakenOver():
                self.say("the trainer is back: going on where the log ends")
            case RunFinished(reason=reason, detail=detail):
                self._phase = reason
                self.say(f"run finished: {reason}{f' ({detail})' if detail else ''}")
            case _:
                pass

    @property
    def status(self) -> str:
        """Where the run is, in one line."""
        done = self._step / self._steps
        parts = [f"{self._bar(done, BAR)} step {self._step}/{self._steps}", self._activity]
        if self._reward is not None:
            parts.append(f"reward {self._reward:.3f}")
        if (left := self._left_s) is not None:
            parts.append(f"{minutes(left)} left")
        return " · ".join(parts) if self._fancy else " | ".join(parts)

    @property
    def _activity(self) -> str:
        purpose = {"generate": "train", "evaluate": "evaluate"}.get(self._phase)
        groups = [group for group in self._asked.values() if group.purpose == purpose]
        if not groups:
            return self._phase
        there, size = sum(group.there for group in groups), sum(group.size for group in groups)
        return f"{self._phase} {there}/{size} episodes"

    @property
    def _left_s(self) -> float | None:
        """From the last steps, as the first ones are slower, and the last evaluation."""
        recent = self._seconds[-5:]
        evaluations = sum(map(self._is_evaluated, range(self._evaluated + 1, self._steps + 1)))
        steps = self._steps - self._step
        if not recent or not steps + evaluations:
            return None
        return sum(recent) / len(recent) * steps + self._evaluation_s * evaluations

    def _is_evaluated(self, step: int) -> bool:
        every = self._evaluate_every
        return every is not None and (step % every == 0 or step == self._steps)

    def _use(self, groups: tuple[str, ...]) -> None:
        for group in groups:
            self._asked.pop(group, None)

    def _begin(self, phase: str) -> None:
        self._phase = phase
        self._news()

    def _news(self) -> None:
        """Show where the run is, not too often."""
        if self._live:
            self._draw(force=False)
        elif self._clock() - self._said_at > QUIET_S:
            place = f"step {self._step + 1}/{self._steps}"
            if self._phase == "evaluate":
                place = f"after step {self._step}" if self._step else "before training"
            self.say(f"{place}: {self._activity}")

    def _finish_step(self, step: int, metrics: dict[str, float]) -> None:
        self._step = step
        self._reward = metrics.get("reward/mean")
        self._seconds.append(metrics.get("perf/step_s", 0.0))
        reward = self._reward or 0.0
        times = ", ".join(
            f"{phase} {metrics[f'perf/{phase}_s']:.1f}"
            for phase in PHASES
            if f"perf/{phase}_s" in metrics
        )
        left = self._left_s
        self.say(
            f"step {step:>{len(str(self._steps))}}/{self._steps}"
            f"  reward {reward:.3f} {self._bar(reward, REWARD_BAR)}"
            f"  {self._seconds[-1]:.1f} s ({times})"
            + (f"  {minutes(left)} left" if left is not None else "")
        )

    def _finish_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        self._evaluated = step
        self._evaluation_s = metrics.get("perf/evaluate_s", 0.0)
        when = "before training" if step == 0 else f"after step {step}"
        reward = metrics.get("reward/mean", 0.0)
        episodes = int(metrics.get("episodes", 0))
        self.say(
            f"held-out {when}: reward {reward:.3f} {self._bar(reward, REWARD_BAR)}"
            f"  {episodes} episodes, {self._evaluation_s:.1f} s"
        )

    def _bar(self, share: float, width: int) -> str:
        full = round(min(1.0, max(0.0, share)) * width)
        on, off = ("█", "░") if self._fancy else ("#", ".")
        return on * full + off * (width - full)

    def _draw(self, *, force: bool = True) -> None:
        now = self._clock()
        if not self._live or (not force and now - self._drawn_at < REDRAW_S):
            return
        self._drawn_at = now
        columns = shutil.get_terminal_size().columns
        self._out.write(CLEAR + self.status[: columns - 1])
        self._out.flush()


def minutes(seconds: float) -> str:
    """`75` as `1:15`."""
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02}"
