"""Whole runs, as a user makes them: a few seconds of each fault. Longer ones: `aworld chaos --seconds 120`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from aworld_runtime.chaos.plan import KINDS
from tests.waiting import wait_until_sync

pytestmark = pytest.mark.chaos
RUN = [sys.executable, "-m", "aworld_runtime.chaos"]


def chaos(*arguments: str, folder: Path) -> tuple[dict[str, Any], str]:
    """What the command found, and what it said; all is kept in `folder` where it found something."""
    done = subprocess.run(
        [*RUN, "--json", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    assert done.returncode in (0, 1), done.stderr
    result = json.loads(done.stdout)
    assert done.returncode == (0 if result["ok"] else 1)
    return result, done.stderr


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "seed, kinds",
    [
        (1, "worker_killed,server_killed"),
        (2, "worker_killed,network_cut,network_half_open,poison"),
        (4, "worker_killed,server_disk_full,poison"),
        (7, "worker_killed,server_emptied"),
        (11, "worker_killed,worker_stopped,server_emptied,store_stopped,store_killed"),
    ],
)
def test_healthy_work_comes_through(seed: int, kinds: str, tmp_path: Path) -> None:
    result, said = chaos(
        "--seconds", "8", "--load", "6", "--seed", str(seed), "--faults", kinds, folder=tmp_path
    )

    # How fast a takeover is, a busy machine can't show.
    assert [v for v in result["violations"] if v["what"] != "takeover_slow"] == []
    assert result["acked"] > 1_000
    assert result["faults"].keys() <= set(kinds.split(","))
    assert result["processes_left"] == 0
    assert ("for what the server lost" in said) == ("server_emptied" in result["faults"])
    assert list(tmp_path.iterdir()) == [] or not result["ok"]


@pytest.mark.timeout(120)
def test_ctrl_c_leaves_no_process_and_says_where_everything_is(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    process = subprocess.Popen(
        [*RUN, "--seconds", "60", "--faults", "worker_killed", "--keep", str(kept)],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until_sync(lambda: bool(list(kept.glob("history/submitter*"))), 30, "work begins")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()

    assert process.returncode == 130
    assert str(kept) in said
    wait_until_sync(lambda: not _running(str(kept)), 10, "every process ends")


def test_the_kinds_of_faults_are_listed() -> None:
    listed = subprocess.run([*RUN, "--list"], capture_output=True, text=True, check=True).stdout

    assert [line.split()[0] for line in listed.splitlines()] == list(KINDS)


def test_an_unknown_kind_is_named_with_those_that_exist() -> None:
    began = time.monotonic()
    refused = subprocess.run(
        [*RUN, "--faults", "earthquake"], capture_output=True, text=True, check=False
    )

    assert refused.returncode == 2
    assert "earthquake" in refused.stderr
    assert "worker_killed" in refused.stderr
    assert time.monotonic() - began < 10


def _running(mark: str) -> list[str]:
    """Processes whose command or environment names the folder of the run."""
    found: list[str] = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                found.append(entry.name)
        except OSError:  # it ended while we looked
            continue
    return found
