"""What a run leaves for people and programs, where the run was short."""

from pathlib import Path
from secrets import token_hex

import pytest

from aworld_runtime.events import Event, GroupRequested, RunFinished, RunStarted
from aworld_runtime.messages import Task
from aworld_runtime.names import run_log
from aworld_runtime.store import open_store
from aworld_runtime.training.config import TrainConfig
from aworld_runtime.training.run_folder import RunFolder, Wiring
from aworld_runtime.training.summary import write_results

pytestmark = pytest.mark.anyio


async def test_a_run_without_an_evaluation_has_no_reward_and_its_report_no_password(
    tmp_path: Path,
) -> None:
    password = token_hex(8)  # in no file: a report holds the checkout's diff
    bus = f"redis://me:{password}@host/0"
    config = TrainConfig(bus=bus)
    argv = ["aworld", "train", "--bus", bus]
    folder = RunFolder.create(tmp_path / "run", config, "r", argv)
    folder.wiring = Wiring(
        run_id="r", code_version="", bus="", model="m", sampler="transformers", sampler_port=1
    )
    group = GroupRequested(group="r.g00001", task=Task(id="t", prompt=""), size=2)
    story = [RunStarted(kind="train"), group, RunFinished(reason="failed")]
    events = [Event.of(data, source="trainer/r", run_id="r") for data in story]
    url = f"sqlite:///{tmp_path}/store.db"
    async with open_store(url) as store:
        await store.put_events(run_log("r"), [e.at(seq) for seq, e in enumerate(events, 1)])

    summary = await write_results(folder, url)
    assert (summary.reward_before, summary.reward_after, summary.steps) == (None, None, 0)
    assert "held-out reward – → –" in summary.text()
    for name in ("report.html", "report.json"):
        text = (folder.path / name).read_text()
        assert password not in text
        assert "redis://me:***@host/0" in text
