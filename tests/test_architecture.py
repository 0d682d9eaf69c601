"""The shape of the project: what importing costs, who may import whom, what the packages hold."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = ("agents", "swarms", "training")
HEAVY = (
    *("torch", "redis", "pymongo", "openai", "anthropic", "mcp", "vllm", "transformers"),
    *("prometheus_client", "opentelemetry"),
)
FOLDERS = (
    "agents",
    "aworld_runtime/archive",
    "aworld_runtime/bus",
    "aworld_runtime/environments",
    "aworld_runtime/models",
    "aworld_runtime/nodes",
    "aworld_runtime/replay",
    "aworld_runtime/store",
    "aworld_runtime/tools",
    "examples",
    "scripts",
    "swarms",
    "training",
)
IMPORT_CPU_SECONDS = 0.3
CORE_PACKAGES = 25
CORE_MEGABYTES = 40
NO_GIT = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a command to its end and return what it printed; fail with all of it if it failed."""
    done = subprocess.run(command, cwd=cwd, env=NO_GIT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_import_loads_no_server_or_model_package(tmp_path: Path) -> None:
    code = "import aworld_runtime, json, sys; print(json.dumps(sorted(sys.modules)))"
    loaded = json.loads(run(sys.executable, "-c", code, cwd=tmp_path))
    assert not {name.split(".")[0] for name in loaded} & set(HEAVY)


def test_import_takes_little_cpu(tmp_path: Path) -> None:
    """The best of three: the machine may be busy."""
    code = """
import time
start = time.process_time()
import aworld_runtime
print(time.process_time() - start)
"""
    best = min(float(run(sys.executable, "-c", code, cwd=tmp_path)) for _ in range(3))
    assert best <= IMPORT_CPU_SECONDS


def test_every_export_resolves() -> None:
    import aworld_runtime

    for name in aworld_runtime.__all__:
        assert getattr(aworld_runtime, name) is not None


def test_unknown_export_is_an_attribute_error_that_names_it() -> None:
    import aworld_runtime

    with pytest.raises(AttributeError, match="'aworld_runtime' has no attribute 'Agnet'"):
        _ = aworld_runtime.Agnet


@pytest.mark.parametrize("folder", FOLDERS)
def test_folder_of_the_design_exists(folder: str) -> None:
    assert (ROOT / folder).is_dir()


def test_import_contracts_hold(tmp_path: Path) -> None:
    """Over a copy, where the upper layers lie inside the package as in the wheel."""
    ignored = shutil.ignore_patterns("__pycache__", *LAYERS)
    shutil.copytree(ROOT / "aworld_runtime", tmp_path / "aworld_runtime", ignore=ignored)
    for layer in LAYERS:
        shutil.copytree(ROOT / layer, tmp_path / "aworld_runtime" / layer)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    run(Path(sys.executable).with_name("lint-imports"), "--no-cache", cwd=tmp_path)


def imported_names(path: Path) -> set[str]:
    """Root names of every import statement of a file, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.split(".")[0])
    return names


def python_files() -> list[Path]:
    tops = ("aworld_runtime", *LAYERS, "tests", "examples")
    return [path for top in tops for path in sorted((ROOT / top).rglob("*.py"))]


def test_gpl_test_service_is_never_imported() -> None:
    assert [path for path in python_files() if "secantusdb" in imported_names(path)] == []


def test_upper_layers_are_imported_under_the_one_root() -> None:
    """`import agents` would take a user's own folder."""
    assert [path for path in python_files() if imported_names(path) & set(LAYERS)] == []


def test_lock_names_exact_versions_and_no_place() -> None:
    lines = (ROOT / "requirements" / "lock.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert "torch==2.13.0" in pins
    assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", pin)] == []


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that git tracks or would track, as they are now, in a folder without git."""
    target = tmp_path_factory.mktemp("clone")
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)
    return target


@pytest.fixture(scope="module")
def distributions(clone: Path) -> tuple[Path, Path]:
    """The sdist, and the wheel built from that sdist."""
    build = ("-m", "hatchling", "build", "-d", clone / "dist", "-t")
    run(sys.executable, *build, "sdist", cwd=clone)
    (sdist,) = (clone / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(clone / "unpacked", filter="data")
    (unpacked,) = (clone / "unpacked").iterdir()
    run(sys.executable, *build, "wheel", cwd=unpacked)
    (wheel,) = (clone / "dist").glob("*.whl")
    return sdist, wheel


@pytest.mark.slow
def test_wheel_holds_the_upper_layers_once_and_inside(distributions: tuple[Path, Path]) -> None:
    names = zipfile.ZipFile(distributions[1]).namelist()
    assert len(names) == len(set(names))
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"aworld_runtime"}
    for path in python_files():
        top = path.relative_to(ROOT).parts[0]
        relative = path.relative_to(ROOT).as_posix()
        if top in LAYERS:
            assert f"aworld_runtime/{relative}" in names
    assert "aworld_runtime/py.typed" in names


USER_CODE = """
import agents, sys
assert agents.MINE
import aworld_runtime, aworld_runtime.agents, aworld_runtime.swarms, aworld_runtime.training
assert "agents" in aworld_runtime.agents.__name__ and aworld_runtime.agents is not agents
from aworld_runtime import Agent, Swarm
print(aworld_runtime.__file__)
"""


def user_project(folder: Path) -> Path:
    """A project with an agents/ folder of its own."""
    (folder / "agents").mkdir(parents=True)
    (folder / "agents" / "__init__.py").write_text("MINE = True\n")
    (folder / "main.py").write_text(USER_CODE)
    return folder / "main.py"


def test_checkout_serves_a_project_with_its_own_agents_folder(tmp_path: Path) -> None:
    main = user_project(tmp_path)
    assert run(sys.executable, main, cwd=tmp_path).startswith(str(ROOT))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_core_install_of_the_wheel_is_small_and_works(
    distributions: tuple[Path, Path], tmp_path: Path
) -> None:
    """Installs from the package index, outside the checkout."""
    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    site = next((home / "lib").glob("python*/site-packages"))
    lock = ROOT / "requirements" / "lock.txt"
    run(python, "-m", "pip", "install", "-q", "--no-compile", "-c", lock, distributions[1])
    main = user_project(tmp_path / "project")
    assert run(python, main, cwd=main.parent).startswith(str(site))
    run(home / "bin" / "aworld", "--help", cwd=tmp_path)

    run(python, "-m", "pip", "uninstall", "-q", "-y", "setuptools")
    packages = json.loads(run(python, "-m", "pip", "list", "--format=json"))
    assert len([package for package in packages if package["name"] != "pip"]) <= CORE_PACKAGES
    files = (path for path in site.rglob("*") if "__pycache__" not in path.parts)
    size = sum(
        path.stat().st_size
        for path in files
        if path.is_file() and not path.relative_to(site).parts[0].startswith("pip")
    )
    assert size <= CORE_MEGABYTES * 1_000_000
