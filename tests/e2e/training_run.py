"""`aworld train` as a process of its own, with a tiny random model: started, watched and broken by the tests."""

# transformers is typed in part only.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from aworld_runtime.bus import Bus
from aworld_runtime.bus.base import read_all
from aworld_runtime.events import (
    BatchFormed,
    EpisodeFinished,
    Event,
    GroupCompleted,
    GroupRequested,
    StepFinished,
)
from aworld_runtime.names import run_log
from aworld_runtime.store.open import open_store
from aworld_runtime.training.run_folder import RunFolder, Wiring
from aworld_runtime.training.run_state import RunState
from tests.e2e.vowels import TASK
from tests.waiting import wait_until

CHECKOUT = Path(__file__).parents[2]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
MARK = "TEST_OF_TRAINING_RUN"
"""In the environment of every process of a run: its folder."""
SETTINGS = {
    "task": TASK,
    "steps": 3,
    "groups_per_step": 2,
    "group_size": 4,
    "evaluate_tasks": 2,
    "evaluate_every": 2,
    "checkpoint_every": 1,
    "worker_num": 2,
    "slots": 4,
    "sampler": "transformers",
    "sampler_max_len": 512,
    "sampler_threads": 1,
    "learner.threads": 1,
    "learner.lr": 1e-3,
}
PATIENCE_S = 50.0


def save_tiny_model(path: Path, tokenizer: Path) -> Path:
    """A random Llama of two layers that speaks SmolLM2's tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=json.loads((tokenizer / "config.json").read_text())["vocab_size"],
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    for name in TOKENIZER_FILES:
        shutil.copy(tokenizer / name, path / name)
    return path


class TrainingRun:
    """One run in `folder`, whose parent is where its commands are given; SQLite store there."""

    def __init__(self, folder: Path, model: Path, **settings: object) -> None:
        self.path = folder
        self.folder = RunFolder(folder)
        self.place = folder.parent
        self.output = self.place / f"{folder.name}.out"
        self.store = str(settings.get("store", f"sqlite:///{self.place / 'store.db'}"))
        self.settings = {
            **SETTINGS,
            "model": model,
            "out": folder,
            **settings,
            "store": self.store,
        }
        self.steps = int(str(self.settings["steps"]))
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def wiring(self) -> Wiring:
        """Where its processes are; once it has started them."""
        return self.folder.wiring

    def start(self) -> None:
        self._start([f"{key}={value}" for key, value in self.settings.items() if value is not None])

    def resume(self) -> None:
        self._start(["--resume", str(self.path)])

    async def finish(self, timeout: float = PATIENCE_S) -> int:
        """Wait for its end; the exit code."""
        await wait_until(lambda: self.code is not None, timeout, f"the end of {self.told()}")
        return self.code or 0

    @property
    def code(self) -> int | None:
        """Its exit code, once it has ended."""
        return None if self.process is None else self.process.poll()

    def told(self) -> str:
        """What it has printed."""
        return self.output.read_text()

    async def until_told(self, text: str, timeout: float = PATIENCE_S) -> None:
        """Wait until it has printed `text`."""

        def told() -> bool:
            assert text in self.told() or self.code is None, self.told()
            return text in self.told()

        await wait_until(told, timeout, f"{text!r} in the output of the run:\n{self.told()}")

    def interrupt(self) -> None:
        """As Ctrl-C in a terminal: to the whole process group."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGINT)

    def kill(self) -> None:
        """Kill -9 of the launcher alone."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def command(self, *arguments: str, timeout: float = 30) -> subprocess.CompletedProcess[str]:
        """Give another command where the run was started."""
        return subprocess.run(
            [sys.executable, "-m", "aworld_runtime.cli", *arguments],
            cwd=self.place,
            env=self._environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )

    def start_worker(self, bus: str, name: str) -> subprocess.Popen[bytes]:
        """A worker that joins on its own; ends with `stop`."""
        argv = ["worker", "--bus", bus, "--name", name, "--slots", "4"]
        with (self.place / f"{name}.out").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "aworld_runtime.cli", *argv],
                cwd=self.place,
                env=self._environment(),
                stdout=output,
                stderr=output,
            )

    def stop(self) -> None:
        """End all that is left of it, whatever a test has left."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait()
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)

    def processes(self, containing: str = "") -> list[int]:
        """Ids of its processes that are alive, the launcher's too; those with `containing` in their command line."""
        mark = f"{MARK}={self.path}".encode()
        return [
            process.pid
            for process in _processes()
            if (mark in process.environment.split(b"\0") or process.place == self.folder.bus)
            and containing.encode() in process.command
        ]

    async def no_process_left(self, timeout: float = 0.0) -> None:
        """Fail where a process of the run lives on for longer than `timeout`."""
        await wait_until(lambda: not self.processes(), timeout, "the end of all processes")

    async def log(self) -> list[Event]:
        """The run's log, as archived."""
        async with open_store(self.store) as store:
            return await read_all(store, run_log(self.folder.run_id))

    async def log_on(self, bus: Bus) -> list[Event]:
        """The run's log, as it is now."""
        return await read_all(bus, run_log(self.folder.run_id))

    async def assert_counted_once(self) -> RunState:
        """Nothing that was asked for is lost, nothing is there twice: episodes, groups, batches, steps."""
        events = await self.log()
        state = RunState.of(events)
        completed = [e.data for e in events if isinstance(e.data, GroupCompleted)]
        requested = [e.data for e in events if isinstance(e.data, GroupRequested)]
        assert sorted(g.group for g in completed) == sorted(g.group for g in requested)
        for group in state.groups.values():
            assert group.completed is not None
            assert len(group.completed.episodes) == group.requested.size
        _assert_once([episode for group in completed for episode in group.episodes])
        _assert_once([e.episode_id for e in events if isinstance(e.data, EpisodeFinished)])
        _assert_once([e.id for e in events])
        batches = [e.data for e in events if isinstance(e.data, BatchFormed)]
        _assert_once([group for batch in batches for group in batch.group_ids])
        steps = [e.data.step for e in events if isinstance(e.data, StepFinished)]
        assert steps == [batch.step for batch in batches] == list(range(1, self.steps + 1))
        lines = (self.path / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == steps
        assert sorted(state.evaluations) == sorted({0, 2, self.steps})
        await self._assert_episodes_stored(completed)
        return state

    async def takeovers(self) -> int:
        """Episodes' changes of owner."""
        async with open_store(self.store) as store:
            records = await store.episodes(run_id=self.folder.run_id, limit=10_000)
        return sum(record.takeovers for record in records)

    async def _assert_episodes_stored(self, completed: Sequence[GroupCompleted]) -> None:
        async with open_store(self.store) as store:
            for name in (name for group in completed for name in group.episodes):
                record = await store.episode(name)
                assert record is not None
                assert record.status is not None

    def _start(self, arguments: Sequence[str]) -> None:
        self.place.mkdir(parents=True, exist_ok=True)
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "aworld_runtime.cli", "train", *arguments],
                cwd=self.place,
                env=self._environment(),
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(CHECKOUT), MARK: str(self.path)}


@contextmanager
def training_run(folder: Path, model: Path, **settings: object) -> Generator[TrainingRun]:
    """A run of which nothing is left behind; not started."""
    run = TrainingRun(folder, model, **settings)
    try:
        yield run
    finally:
        run.stop()


def _assert_once(names: Sequence[object]) -> None:
    twice = {name for name in names if names.count(name) > 1}
    assert not twice


@dataclass(frozen=True)
class Process:
    """What the kernel says of it."""

    pid: int
    command: bytes
    environment: bytes
    """A bus server writes its title over this."""
    place: Path
    """Its working folder."""


def _processes() -> Iterator[Process]:
    """Every process that can be read; of a zombie nothing can."""
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                yield Process(
                    pid=int(process.name),
                    command=(process / "cmdline").read_bytes().replace(b"\0", b" "),
                    environment=(process / "environ").read_bytes(),
                    place=(process / "cwd").readlink(),
                )
            except OSError:
                continue
