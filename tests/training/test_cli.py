"""`aworld train`: where it looks for code, and what it says when it fails."""

import subprocess
import sys
from pathlib import Path

import pytest

from aworld_runtime.cli.command_line import explain, main
from aworld_runtime.errors import SamplerError


def test_a_task_is_found_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An installed command has its own folder on the import path, and not the user's."""
    (tmp_path / "my_training_tasks.py").write_text("chess = 64\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["train", "--task", "my_training_tasks:chess"]) == 2
    assert "'my_training_tasks:chess' is a int, not a TrainingTask" in capsys.readouterr().err


@pytest.mark.parametrize(
    "use, code",
    [
        ("from aworld_runtime.cli.command_line import main; sys.exit(main(['train']))", 2),
        ("from aworld_runtime import train", 1),
    ],
)
def test_without_its_extra_training_says_which_one_it_needs(use: str, code: int) -> None:
    absent = "import sys; sys.modules['pyarrow'] = None"
    done = subprocess.run(
        [sys.executable, "-c", f"{absent}; {use}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == code
    assert done.stderr.splitlines()[-1].endswith(
        "training needs the extra 'train' (pyarrow is missing): pip install 'aworld-rt[train]'"
    )
    assert code == 1 or len(done.stderr.splitlines()) == 1


def test_a_sampler_that_does_not_start_is_one_line_and_no_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    failed = BaseExceptionGroup("parts", [SamplerError("the port is taken")])
    assert explain(failed) == 1
    assert capsys.readouterr().err == "aworld: error: the port is taken\n"
