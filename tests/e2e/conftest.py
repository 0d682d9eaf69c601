"""What tests of whole training runs share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from aworld_runtime.training.smollm2 import resolve_model
from tests.e2e.training_run import TrainingRun, save_tiny_model, training_run

NewRun = Callable[..., TrainingRun]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model", resolve_model())


@pytest.fixture
def new_run(tmp_path: Path, tiny_model: Path) -> Iterator[NewRun]:
    """A training run in the test's folder; what it leaves is ended after the test."""
    with ExitStack() as stack:

        def new(**settings: object) -> TrainingRun:
            return stack.enter_context(training_run(tmp_path / "run", tiny_model, **settings))

        yield new
