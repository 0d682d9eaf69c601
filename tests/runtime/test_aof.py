"""Holes in a server's append-only file. What a real server leaves and refuses is in test_deaths.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from aworld_runtime.bus.aof import DamagedFileError, find_holes, mend

SET = b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$6\r\n\0\0*\r\n\0\r\n"
TIME = b"#TS:1764500000\r\n"
HOLE = bytes(500)


@pytest.mark.parametrize("content", [b"", SET, TIME + SET + SET, SET + SET[:20], SET + b"*3"])
def test_commands_have_no_holes_whatever_is_in_them(content: bytes) -> None:
    assert find_holes(content) == []


def test_holes_are_found_between_commands_and_at_the_end() -> None:
    one, two = len(SET), len(SET + HOLE + SET)

    assert find_holes(SET + HOLE + SET + HOLE) == [(one, one + 500), (two, two + 500)]


@pytest.mark.parametrize(
    "damage", [b"junk", SET[:20] + HOLE + SET, b"*x\r\n" + SET, b"*1\r\n:5\r\n"]
)
def test_other_damage_is_told_and_left_as_it_is(tmp_path: Path, damage: bytes) -> None:
    file = tmp_path / "appendonly.aof.2.incr.aof"
    file.write_bytes(SET + HOLE + damage)

    with pytest.raises(DamagedFileError):
        mend(tmp_path)

    assert file.read_bytes() == SET + HOLE + damage


def test_what_is_around_a_hole_stays(tmp_path: Path) -> None:
    folder = tmp_path / "appendonlydir"
    folder.mkdir()
    (folder / "appendonly.aof.1.incr.aof").write_bytes(SET)
    (folder / "appendonly.aof.2.incr.aof").write_bytes(SET + HOLE + TIME + SET)
    (folder / "appendonly.aof.3.incr.aof").touch()

    assert mend(folder) == 500
    assert mend(folder) == 0
    assert (folder / "appendonly.aof.2.incr.aof").read_bytes() == SET + TIME + SET
    assert [path.name for path in tmp_path.iterdir()] == ["appendonlydir"]
