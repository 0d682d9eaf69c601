"""The task of docs/training.md is trained as the page says, from a folder of the user's own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.e2e.conftest import NewRun

PAGE = Path(__file__).parents[2] / "docs" / "training.md"


@pytest.mark.anyio
@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_the_task_of_the_documentation_can_be_trained(
    new_run: NewRun, tmp_path: Path
) -> None:
    (code,) = (
        b for b in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "class " in b
    )
    assert len(code.splitlines()) <= 30
    (tmp_path / "my_tasks.py").write_text(code)
    run = new_run(task="my_tasks:capitals", steps=1, worker_num=1)
    run.start()
    assert await run.finish() == 0, run.told()
    (step,) = (run.path / "metrics.jsonl").read_text().splitlines()
    assert {"reward/capitals", "reward/right"} <= json.loads(step).keys()
