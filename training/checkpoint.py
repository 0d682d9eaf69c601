"""Checkpoints: everything that makes the next loss the same, in one folder that appears whole or not at all.

    step-00000012/
        model.safetensors     float32 weights under their Hugging Face names
        optimizer.pt          tensors and numbers only: read with weights_only, so no code can hide in it
        rng.pt                torch's generators
        state.json            step, policy_version, and the caller's cursor

Written beside under another name, flushed to disk, then renamed; a crash leaves the previous checkpoint the newest.
"""

# torch and transformers annotate themselves only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from pydantic import JsonValue
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from aworld_runtime.errors import CheckpointError

STATE_FILE = "state.json"


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """The part of a checkpoint that is not tensors."""

    step: int
    """Optimizer steps taken."""
    policy_version: int
    cursor: JsonValue = None
    """The caller's own: what has been consumed, so that resume goes on after it."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    weights: Mapping[str, Tensor]
    optimizer: dict[str, Any]
    rng: Mapping[str, Tensor]
    state: CheckpointState


def save_checkpoint(folder: Path, checkpoint: Checkpoint, *, keep: int) -> Path:
    """Write a new checkpoint into `folder` and delete all but the newest `keep`; returns its path."""
    final = folder / f"step-{checkpoint.state.step:08d}"
    partial = folder / f".partial-{final.name}"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        weights = {name: tensor.contiguous() for name, tensor in checkpoint.weights.items()}
        save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
        _save(checkpoint.optimizer, partial / "optimizer.pt")
        _save(dict(checkpoint.rng), partial / "rng.pt")
        (partial / STATE_FILE).write_text(json.dumps(asdict(checkpoint.state)))
        for path in [*partial.iterdir(), partial]:
            _flush(path)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        _flush(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"can't write checkpoint {final}: {error}") from error
    for old in _checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def load_checkpoint(path: Path) -> Checkpoint:
    """Read what `save_checkpoint` wrote."""
    try:
        return Checkpoint(
            weights=load_file(path / "model.safetensors"),
            optimizer=_load(path / "optimizer.pt"),
            rng=_load(path / "rng.pt"),
            state=CheckpointState(**json.loads((path / STATE_FILE).read_text())),
        )
    except (OSError, EOFError, SafetensorError, ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{path} is no checkpoint that can be read: {error}") from error


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint in `folder`; None if there is none."""
    found = _checkpoints(folder)
    return found[-1] if found else None


def _checkpoints(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if re.fullmatch(r"step-\d{8,}", path.name))


def _save(content: dict[str, Any], path: Path) -> None:
    try:
        with path.open("wb") as file:
            torch.save(content, file)
    except RuntimeError as error:  # torch has met the file's error, and says another
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _load(path: Path) -> dict[str, Any]:
    return cast("dict[str, Any]", torch.load(path, weights_only=True, map_location="cpu"))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
