"""The end of a run: its numbers, and the files people and programs read."""

from __future__ import annotations

from aworld_runtime.messages import Data


class RunSummary(Data):
    """What came of a training run."""

    run_id: str
    folder: str
    steps: int
    reward_before: float
    """Held-out mean before the first step."""
    reward_after: float
    """Held-out mean after the last step."""
    episodes: int
    seconds: float
    report: str
    model: str

    def text(self) -> str:
        return (
            f"held-out reward {self.reward_before:.3f} → {self.reward_after:.3f} in {self.steps} steps,"
            f" {self.seconds:.0f} s, {self.episodes} episodes\nmodel:  {self.model}\nreport: {self.report}"
        )
