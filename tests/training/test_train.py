"""What is said of a run that has stopped."""

from pathlib import Path

from aworld_runtime.errors import ConfigError, RunLostError, SamplerError
from aworld_runtime.training.run_folder import RunFolder
from aworld_runtime.training.train import what_now


def test_a_run_that_began_can_be_resumed_whatever_stopped_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "my runs" / "#1")
    hint = f"nothing is lost: continue with aworld train --resume '{tmp_path}/my runs/#1'"
    assert what_now(SamplerError("died"), folder, began=False) == hint
    assert what_now(ConfigError("port 1 is taken"), folder, began=True) == hint
    assert what_now(ConfigError("port 1 is taken"), folder, began=False) is None


def test_of_a_run_that_the_bus_has_lost_the_checkpoints_are_named(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.checkpoints.mkdir()
    hint = what_now(RunLostError("0 of 9 events"), folder, began=True)
    assert hint == f"what is left of it: {tmp_path}/checkpoints"
