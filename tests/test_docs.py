"""What the documentation names exists: tests, commands and their arguments."""

import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from aworld_runtime.cli.command_line import COMMANDS, Parser

TESTS = Path(__file__).parent
README = TESTS.parent / "README.md"
PAGES = sorted((TESTS.parent / "docs").glob("*.md"))


def defined_in(path: Path) -> set[str]:
    return set(re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE))


def named(page: Path) -> Iterator[tuple[str, str]]:
    """File, empty where none is named, and the test, which may end in `…`."""
    yield from re.findall(r"`(?:([\w/]+\.py)::)?(test_\w+…?)(?=[`,])", page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    wanted = list(named(page))
    files = {name: defined_in(TESTS / name) for name, _ in wanted if name}
    if any(not name for name, _ in wanted):
        files[""] = set[str]().union(*map(defined_in, TESTS.rglob("test_*.py")))
    missing = [
        f"{file}::{test}"
        for file, test in wanted
        if not any(
            have == test or (test[-1] == "…" and have.startswith(test[:-1])) for have in files[file]
        )
    ]
    assert missing == []


def test_each_row_of_what_happens_names_its_test() -> None:
    _, _, rest = (TESTS.parent / "docs/delivery.md").read_text().partition("\n## What happens when")
    what_happens, _, _ = rest.partition("\n## ")
    rows = re.findall(r"^\| (?!X |---)(.*)$", what_happens, re.MULTILINE)
    assert len(rows) > 25
    assert [row for row in rows if "::test_" not in row] == []


def commands(page: Path) -> Iterator[list[str]]:
    """Name and arguments of each `aworld` command on a line of its own."""
    for line in re.findall(r"^(?:\$ )?(aworld .*?)(?: +#.*)?$", page.read_text(), re.MULTILINE):
        for command in line.rstrip(" &").split(";"):
            _, *arguments = shlex.split(command)
            yield arguments


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.stem)
def test_whatever_a_page_imports_of_ours_is_there(page: Path) -> None:
    imports = re.findall(
        r"^from (aworld_runtime[\w.]*) import (.*)$", page.read_text(), re.MULTILINE
    )
    for module, names in imports:
        for name in names.split(", "):
            assert hasattr(importlib.import_module(module), name), f"{module} has no {name}"


def test_the_readme_names_every_command_in_the_order_of_the_overview() -> None:
    (listed,) = re.findall(r"`aworld ([^`]* · [^`]*)`", README.read_text())
    assert re.split(r"\s+·\s+", listed) == list(COMMANDS)


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.stem)
def test_every_command_that_a_page_shows_is_understood(page: Path) -> None:
    for name, *arguments in commands(page):
        module = importlib.import_module(COMMANDS[name].reference.partition(":")[0])
        parser = Parser(prog=f"aworld {name}")
        module.add_arguments(parser)
        parser.parse_args(arguments)
