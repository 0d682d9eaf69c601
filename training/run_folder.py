"""A training run's folder: what it was told, what it runs on, and what came out."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib.metadata import distributions
from pathlib import Path
from shlex import quote
from typing import Literal

import yaml
from pydantic import JsonValue, TypeAdapter, ValidationError

from aworld_runtime.errors import ConfigError, NotFoundError
from aworld_runtime.messages import Data
from aworld_runtime.training.config import TrainConfig
from aworld_runtime.urls import shown

GIT_DEADLINE_S = 10
FACTS = TypeAdapter(dict[str, JsonValue])


class Wiring(Data):
    """Where the run's processes find one another; written anew at each start."""

    run_id: str
    code_version: str
    bus: str
    model: str
    """The folder of the model that training starts from."""
    sampler: Literal["vllm", "transformers"]
    sampler_port: int


class RunFolder:
    """Paths and files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.bus = self.path / "bus"
        self.log = self.path / "log"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self.report = self.path / "report.html"

    @classmethod
    def create(
        cls, path: Path, config: TrainConfig, wiring_id: str, argv: Sequence[str]
    ) -> RunFolder:
        """A new folder with the resolved configuration and where it came from.

        Raises:
            ConfigError: the folder holds another run, or other files.
        """
        folder = cls(path)
        if folder._config_file.exists():
            raise ConfigError(
                f"out={path}: holds another run; continue it with --resume {quote(str(path))}, or name another folder"
            )
        if folder.path.exists() and (not folder.path.is_dir() or any(folder.path.iterdir())):
            raise ConfigError(f"out={path}: is not an empty folder; name another one")
        try:
            folder.log.mkdir(parents=True)
        except OSError as error:
            raise ConfigError(f"out={path}: can't be made: {error}") from error
        _write_secret(
            folder._config_file, yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
        )
        folder._provenance_file.write_text(json.dumps(provenance(wiring_id, argv), indent=2) + "\n")
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing run's folder.

        Raises:
            NotFoundError: it holds no run.
        """
        folder = cls(path)
        if not folder._config_file.exists():
            raise NotFoundError(f"{path} holds no run: there is no {folder._config_file.name}")
        return folder

    @contextmanager
    def held(self) -> Generator[None]:
        """Be the one who runs it; the kernel lets go if we die.

        Raises:
            ConfigError: somebody else does.
        """
        with (self.path / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"{self.path}: another process is training this run; wait for it, or stop it"
                ) from None
            yield

    @property
    def started(self) -> bool:
        """Whether its processes have ever been started."""
        return self._wiring_file.exists()

    @property
    def config(self) -> TrainConfig:
        with _reading(self._config_file):
            return TrainConfig.model_validate(yaml.safe_load(self._config_file.read_text()))

    @property
    def run_id(self) -> str:
        with _reading(self._provenance_file):
            return str(self.provenance["run_id"])

    @property
    def provenance(self) -> dict[str, JsonValue]:
        with _reading(self._provenance_file):
            return FACTS.validate_json(self._provenance_file.read_bytes())

    @property
    def wiring(self) -> Wiring:
        with _reading(self._wiring_file):
            return Wiring.model_validate_json(self._wiring_file.read_bytes())

    @wiring.setter
    def wiring(self, wiring: Wiring) -> None:
        _write_secret(self._wiring_file, wiring.model_dump_json(indent=2) + "\n")

    @property
    def _config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def _provenance_file(self) -> Path:
        return self.path / "provenance.json"

    @property
    def _wiring_file(self) -> Path:
        return self.path / "wiring.json"


@contextmanager
def _reading(file: Path) -> Generator[None]:
    """Say in one line which file of the run is missing or damaged."""
    try:
        yield
    except (OSError, ValueError, KeyError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        if isinstance(error, ValidationError):
            fault = error.errors(include_url=False)[0]
            why = ": ".join(str(part) for part in (*fault["loc"], fault["msg"]))
        raise ConfigError(
            f"{file}: can't be read: {why}; put it back from a copy, or start a new run"
        ) from error


def provenance(run_id: str, argv: Sequence[str]) -> dict[str, JsonValue]:
    """What must be the same to get the same run again: code, packages, command, hardware."""
    source = Path(__file__).resolve().parent.parent
    packages = sorted(f"{d.metadata['Name']}=={d.version}" for d in distributions())
    diff = _git(source, "diff", "HEAD")
    return {
        "run_id": run_id,
        "command": [shown(word) for word in argv],
        "commit": _git(source, "rev-parse", "HEAD") or None,
        "diff": diff,
        "packages": list[JsonValue](packages),
        "packages_sha256": hashlib.sha256("\n".join(packages).encode()).hexdigest(),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
    }


def _write_secret(path: Path, text: str) -> None:
    """Whole or not at all, and for this user alone: URLs of servers hold passwords."""
    new = path.with_name(f".{path.name}.new")
    new.touch(mode=0o600)
    new.write_text(text)
    new.replace(path)


def _git(folder: Path, *arguments: str) -> str:
    """What git says; nothing where there is no git or no checkout."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=GIT_DEADLINE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
