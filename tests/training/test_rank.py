"""What a learner rank does when its sampler stays away."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from aworld_runtime.errors import TrainingError
from aworld_runtime.training import rank
from aworld_runtime.training.learner import Learner
from aworld_runtime.training.rank import SamplerPublisher
from aworld_runtime.training.sampler import choose_sampler

pytestmark = pytest.mark.anyio


async def test_a_sampler_that_stays_away_ends_the_run_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank, "SAMPLER_PATIENCE_S", 0.2)
    kind, _ = choose_sampler("transformers")
    sampler = kind(tmp_path, log=tmp_path / "sampler.log")  # not started
    publisher = SamplerPublisher(cast("Learner", None), sampler)
    with pytest.raises(TrainingError, match=r"has been away for 0.2 s; its log: .*sampler.log"):
        await publisher.wait_until_ready()
