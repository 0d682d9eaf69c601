"""`scripts/train` before and after installing."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """One in which nothing is installed."""
    folder = tmp_path / "checkout"
    (folder / "scripts").mkdir(parents=True)
    shutil.copy(SCRIPTS / "train", folder / "scripts")
    return folder


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


def train(checkout: Path, place: Path, *arguments: str) -> str:
    command = [checkout / "scripts" / "train", *arguments]
    return subprocess.run(command, cwd=place, capture_output=True, text=True, check=True).stdout


def test_help_installs_nothing(checkout: Path, tmp_path: Path) -> None:
    told = train(checkout, tmp_path, "--steps", "2", "--help")
    assert all(flag in told for flag in ("--seed", "--steps", "--out", "--resume"))
    assert [path.name for path in checkout.iterdir()] == ["scripts"]


def test_training_runs_in_the_callers_folder(checkout: Path, tmp_path: Path) -> None:
    executable(checkout / "scripts" / "install", 'echo "install $*"')
    executable(checkout / ".venv" / "bin" / "aworld", 'echo "$PWD: aworld $*"')
    place = tmp_path / "project"
    place.mkdir()
    told = train(checkout, place, "--out", "here", "learner.lr=1e-5").splitlines()
    assert told == ["install --train", f"{place}: aworld train --out here learner.lr=1e-5"]
