"""Two steps of the real thing: SmolLM2 sampled by vLLM over a real bus, and learned from."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from aworld_runtime.events import PolicyPublished
from aworld_runtime.store.open import open_store
from aworld_runtime.training.smollm2 import resolve_model
from aworld_runtime.training.summary import episodes_of
from tests.e2e.training_run import training_run

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.vllm,
    pytest.mark.timeout(400),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]


async def test_two_steps_with_vllm_publish_versions_and_agree_on_logprobs(tmp_path: Path) -> None:
    settings = {"task": "calculator", "sampler": "vllm", "steps": 2, "sampler_threads": None}
    learner = {"learner.threads": None, "learner.lr": 1e-5}
    with training_run(tmp_path / "run", resolve_model(), **settings, **learner) as run:
        run.start()
        assert await run.finish(timeout=380) == 0, run.told()
        await run.no_process_left()
        state = await run.assert_counted_once()
        published = [e for e in await run.log() if isinstance(e.data, PolicyPublished)]
        assert [event.policy_version for event in published] == [1, 2]
        groups = {name: group for name, group in state.groups.items() if group.completed}
        async with open_store(run.store) as store:
            names = [name for group in groups.values() for name in group.finished.values()]
            versions: dict[str, set[int]] = {}
            async for episode in episodes_of(store, names):
                for turn in (turn for t in episode.trajectories for turn in t.turns):
                    spans, tokens = turn.completion.version_spans, turn.completion.token_ids
                    assert [span.start for span in spans] == [0, *(s.end for s in spans[:-1])]
                    assert spans[-1].end == len(tokens) == len(turn.completion.behavior_logprobs)
                    found = versions.setdefault(episode.group_id or "", set())
                    found |= {span.version for span in spans}
        trained = [state.batches[step].group_ids for step in (1, 2)]
        assert [{v for g in batch for v in versions[g]} for batch in trained] == [{0}, {1}]
    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    assert all(json.loads(line)["actor/logprob_gap"] <= 0.05 for line in lines)
