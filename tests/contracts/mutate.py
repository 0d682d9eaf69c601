"""Whether the machine (test_bus_machine.py) notices when the bus breaks a promise: `python -m tests.contracts.mutate`.

    mutants.py ─▶ one at a time into a copy of the project ─▶ the machine, as the suite runs it ─▶ a line of the table

Words after the command choose mutants by what is said of them. It fails where a mutant isn't found, or no longer fits.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.contracts.mutants import MUTANTS, Mutant

PROJECT = Path(__file__).parents[2]
MACHINE = "tests/contracts/test_bus_machine.py"
LONGEST_S = 300.0
COPIED = ("aworld_runtime", "tests", "pyproject.toml")


@dataclass(frozen=True)
class Verdict:
    """What the machine says of a bus."""

    found: bool
    how: str
    """What it stumbled over."""
    seconds: float


def main() -> int:
    """The number of mutants that were not found."""
    words = sys.argv[1:]
    chosen = [
        mutant for mutant in MUTANTS if all(word in f"{mutant.file} {mutant.why}" for word in words)
    ]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        copy_project(copy)
        for backend in sorted({mutant.backend for mutant in chosen}):
            healthy = run_machine(copy, backend)
            if healthy.found:
                raise SystemExit(f"{backend}: it fails without any mutant: {healthy.how}")
            say(f"{'holds':9} {healthy.seconds:5.1f} s  {backend:6}  as it is")
        missed = 0
        for mutant in chosen:
            verdict = try_out(copy, mutant)
            missed += not verdict.found
            found = "found" if verdict.found else "NOT FOUND"
            say(
                f"{found:9} {verdict.seconds:5.1f} s  {mutant.backend:6}  {mutant.why}: {verdict.how}"
            )
    say(f"{len(chosen) - missed} of {len(chosen)} found")
    return missed


def copy_project(to: Path) -> None:
    """What the machine needs of it, as it stands here now."""
    for name in COPIED:
        if (PROJECT / name).is_file():
            shutil.copy(PROJECT / name, to / name)
        else:
            unneeded = shutil.ignore_patterns("__pycache__")
            shutil.copytree(PROJECT / name, to / name, symlinks=True, ignore=unneeded)


def try_out(copy: Path, mutant: Mutant) -> Verdict:
    """The copy is as before afterwards."""
    place = copy / mutant.file
    healthy = place.read_text()
    if healthy.count(mutant.old) != 1:
        return Verdict(found=False, how=f"fits {healthy.count(mutant.old)} times", seconds=0.0)
    place.write_text(healthy.replace(mutant.old, mutant.new))
    try:
        return run_machine(copy, mutant.backend)
    finally:
        place.write_text(healthy)


def run_machine(copy: Path, backend: str) -> Verdict:
    """Over a bus of this kind, until it stumbles."""
    options = ("--hypothesis-profile=mutants", "--timeout=0", "--tb=short", "--show-capture=no")
    pytest = (sys.executable, "-B", "-m", "pytest", "-p", "no:cacheprovider")
    command = (*pytest, MACHINE, "-k", backend, *options)
    environment = {**os.environ, "PYTHONPATH": str(copy), "REQUIRE_SERVICES": "1"}
    began = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Verdict(found=True, how="it doesn't end", seconds=LONGEST_S)
    if done.returncode not in (0, 1):
        raise SystemExit(f"the machine doesn't run:\n{done.stdout}\n{done.stderr}")
    return Verdict(bool(done.returncode), stumbled_over(done.stdout), time.monotonic() - began)


def stumbled_over(report: str) -> str:
    """The last error of pytest's report, and where it says nothing, the line that raised it."""
    errors = re.findall(r"^    (\S.*)\n(?:[ ^]+\n)?E +([\w.]+)(?:: (.+))?$", report, re.MULTILINE)
    if not errors:
        return ""
    line, error, message = errors[-1]
    return f"{error}: {message or line}"


def say(line: str) -> None:
    """Now, though the output may be a file."""
    sys.stdout.write(f"{line[:200]}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
