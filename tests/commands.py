"""Our commands as processes of their own, for tests."""

import os
import subprocess
import sys
import urllib.request
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.waiting import wait_until_sync


@contextmanager
def serving(
    command: str,
    *arguments: str,
    says: str,
    cwd: Path,
    environment: Mapping[str, str] | None = None,
) -> Generator[subprocess.Popen[str]]:
    """`aworld COMMAND`, once it `says` that it is ready, in COMMAND.log; killed on the way out if it is still there."""
    log = cwd / f"{command}.log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "aworld_runtime.cli", command, *arguments],
            cwd=cwd,
            stderr=stderr,
            text=True,
            env=os.environ | (environment or {}),
        )
    try:
        wait_until_sync(
            lambda: says in log.read_text() or process.poll() is not None,
            20,
            f"aworld {command} is ready",
        )
        yield process
    finally:
        process.kill()
        process.wait()


def get_text(url: str) -> str:
    with urllib.request.urlopen(url) as answer:  # noqa: S310 - our own process
        assert answer.status == 200
        return answer.read().decode()
