"""The transcripts of docs/replay.md are what comes when they are done again."""

from __future__ import annotations

import io
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from aworld_runtime import cli
from tests.e2e.test_readme import ID, ROOT, blocks, without_chance

PROMPT = "(aworld) "


class Transcript:
    """What a page shows of a terminal, command by command, done again: the ids on the page stand for those of this time."""

    def __init__(self, page: str, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self._ids: dict[str, str] = {}
        self.commands = [
            command
            for block in blocks("console", page)
            for command in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
        ]

    def repeat(self, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each line that the page shows of the command's output comes."""
        line, *shown = command.splitlines()
        typed = [reply.partition(PROMPT)[2] for reply in shown if reply.startswith(PROMPT)]
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(typed)))
        self._capsys.readouterr()
        assert cli.main(shlex.split(self._of_this_time(line))[1:]) < 2
        out = self._capsys.readouterr().out.splitlines()
        left = {without_chance(line): line for line in out}
        for one in shown:
            if one and one != "…" and not one.startswith(PROMPT):
                there = left.get(without_chance(one))
                assert there is not None, f"{line}: {one!r} is not in\n" + "\n".join(out)
                self._ids |= zip(ID.findall(one), ID.findall(there), strict=True)

    def _of_this_time(self, command: str) -> str:
        return re.sub(ID, lambda found: self._ids[found[0]], command)


def test_every_transcript_of_the_page_on_replay_is_what_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one folder, in the page's order, in this process."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("AWORLD_BUS", "AWORLD_STORE"):
        monkeypatch.delenv(name, raising=False)
    transcript = Transcript((ROOT / "docs" / "replay.md").read_text(), capsys)
    assert len(transcript.commands) > 8
    for command in transcript.commands:
        transcript.repeat(command, monkeypatch)
