"""`aworld replay-step`: the steps of a real trainer and learner, with a tiny model, taken again from the store."""

# torch and safetensors annotate themselves only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest
import torch
from safetensors.torch import load_file, save_file

from aworld_runtime.archive.archiver import Archiver
from aworld_runtime.archive.logs import OpenedToRead
from aworld_runtime.bus import open_bus
from aworld_runtime.bus.base import read_all
from aworld_runtime.cli.command_line import main
from aworld_runtime.errors import NonFiniteLossError
from aworld_runtime.events import (
    Event,
    EventData,
    ModelCompleted,
    Registry,
    RewardGiven,
    RunStarted,
    StepFinished,
)
from aworld_runtime.names import episode_log, run_log
from aworld_runtime.nodes.environment import load_environment
from aworld_runtime.nodes.worker import Worker
from aworld_runtime.store import open_store
from aworld_runtime.store.base import RunRecord
from aworld_runtime.training.config import TrainConfig
from aworld_runtime.training.learner_config import LearnerConfig
from aworld_runtime.training.other_ranks import learner_of
from aworld_runtime.training.rank import AllRanks
from aworld_runtime.training.replay_step import RebuiltStep, rebuild_step
from aworld_runtime.training.rows import TrainingRow
from aworld_runtime.training.run_folder import RunFolder, Wiring
from aworld_runtime.training.step_report import StepReport
from aworld_runtime.training.summary import write_results
from aworld_runtime.training.trainer import Trainer
from tests.training.tiny import save_tiny_model
from tests.training.trainer_case import CASE, FAILING, SERVED, UNSCORABLE, RecordingPublisher

CONFIG = TrainConfig(
    task="tests.training.trainer_case:CASE",
    steps=4,
    groups_per_step=2,
    group_size=4,
    evaluate_every=4,
    evaluate_tasks=1,
    checkpoint_every=2,
    stall_timeout_s=20,
    learner=LearnerConfig(dtype="float32", lr=1e-3, threads=1),
)
EPISODE = "r.g00004.1.1"
"""Of the second step's batch: the first group is evaluated."""


@dataclass(frozen=True)
class Run:
    """A finished run, and all that it left."""

    place: Path

    @property
    def folder(self) -> Path:
        return self.place / "run"

    @property
    def model(self) -> Path:
        return self.place / "model"

    @property
    def store(self) -> str:
        return f"sqlite:///{self.place}/store.db"

    def rebuild(self, step: int) -> RebuiltStep:
        async def rebuild() -> RebuiltStep:
            async with open_store(self.store) as store:
                return await rebuild_step(store, "r", step, folder=self.folder, model=self.model)

        return asyncio.run(rebuild())

    def command(self, *arguments: str) -> int:
        moved = ["--folder", str(self.folder), "--model", str(self.model), "--store", self.store]
        return main(["replay-step", "r", *moved, *arguments])

    def change(self, log: str, change: Callable[[EventData], EventData | None]) -> None:
        """Rewrite the events of a log in the store for which `change` gives other data."""

        async def read() -> list[tuple[int, bytes]]:
            registry = Registry()
            async with open_store(self.store) as store:
                return [
                    (event.seq, registry.encode(event.model_copy(update={"data": data})))
                    for event in await read_all(store, log)
                    if (data := change(event.data)) is not None
                ]

        self.execute(
            "UPDATE events SET body = ? WHERE log = ? AND seq = ?",
            [(body, log, seq) for seq, body in asyncio.run(read())],
        )

    def execute(self, statement: str, values: Sequence[tuple[object, ...]]) -> None:
        """In the store's file, once for each of the values, which must not be none."""
        assert values
        with closing(sqlite3.connect(self.place / "store.db")) as database, database:
            database.executemany(statement, values)


class Stopping(AllRanks):
    """A learner that can't take step 4."""

    def step(self, rows: Sequence[TrainingRow], *, policy_version: int) -> StepReport:
        if policy_version == 3:
            raise NonFiniteLossError("planted")
        return super().step(rows, policy_version=policy_version)


def train(run: Run, config: TrainConfig, kinds: Sequence[type[AllRanks]]) -> None:
    """Train to the end, by one learner after the other, each of which resumes what the one before left."""
    save_tiny_model(run.model)
    config = config.model_copy(update={"model": str(run.model)})
    folder = RunFolder.create(run.folder, config, "r", ["aworld", "train"])
    folder.wiring = Wiring(
        run_id="r",
        code_version="",
        bus="",
        model=config.model,
        sampler="transformers",
        sampler_port=1,
    )
    with ExitStack() as stack:
        ranks = config.learner_ranks
        learners = [
            kind(stack.enter_context(learner_of(run.model, config.learner, ranks=ranks)), folder)
            for kind in kinds
        ]
        asyncio.run(train_by(run, folder, learners))


async def train_by(run: Run, folder: RunFolder, learners: Sequence[AllRanks]) -> None:
    SERVED[0] = 0
    FAILING.clear()
    UNSCORABLE.clear()
    async with (
        open_bus("memory://") as bus,
        open_store(run.store) as store,
        Archiver(bus, store) as archiver,
        anyio.create_task_group() as working,
    ):
        working.start_soon(Worker(bus, name="w1", slots=4).run)
        for learner in learners:
            trainer = Trainer(
                bus=bus,
                store=OpenedToRead(run.store),
                run_id="r",
                config=folder.config,
                task=CASE,
                environment=load_environment(CASE.environment),
                model=None,
                learner=learner,
                publisher=RecordingPublisher(),
                folder=folder.path,
            )
            stops = isinstance(learner, Stopping)
            with pytest.raises(ExceptionGroup) if stops else nullcontext():
                await trainer.run()
        working.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await archiver.drain(10)
    await write_results(folder, run.store)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Stopped before step 4, and resumed from the checkpoint of step 2."""
    threads = torch.get_num_threads()
    run = Run(tmp_path_factory.mktemp("replay_step"))
    train(run, CONFIG, [Stopping, AllRanks])
    yield run
    torch.set_num_threads(threads)


@pytest.fixture
def run(whole: Run, tmp_path: Path) -> Run:
    """The same elsewhere, to be broken."""
    return Run(shutil.copytree(whole.place, tmp_path / "moved"))


def test_every_step_is_rebuilt_bit_for_bit_also_those_after_a_resume(
    whole: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay-step", "last", "--store", whole.store, "--all"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"step {n}: identical" for n in (1, 2, 3, 4)]


def test_a_step_comes_with_its_rows_advantages_and_report(whole: Run) -> None:
    rebuilt = whole.rebuild(2)
    assert rebuilt.comparison.identical
    assert [row.reward for row in rebuilt.rows] == [1, 0, 0, 0, 0, 1, 0, 0]
    assert sum(rebuilt.advantages[:4]) == pytest.approx(0)
    assert rebuilt.report.policy_version == 1
    trained = [terms for terms in rebuilt.tokens if terms is not None]
    assert len(trained) == rebuilt.report.rows - rebuilt.report.rows_dropped > 0
    losses = [loss * terms.coefficient for terms in trained for loss in terms.losses]
    assert sum(losses) == pytest.approx(rebuilt.report.loss, rel=1e-5)
    assert [terms.ratios for terms in trained] == [(1.0,)] * len(trained)
    assert rebuilt.comparison.weights == f"{whole.model}, and 1 more step"


def test_nothing_is_written(run: Run) -> None:
    def files() -> dict[Path, int]:
        kept = (path for path in run.place.rglob("*") if not path.name.startswith("store.db-"))
        return {path: path.stat().st_mtime_ns for path in kept if path.is_file()}

    before = files()
    assert run.command("--all") == 0
    assert files() == before


def test_json_says_the_same(whole: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert whole.command("--step", "3", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["identical"], said["different"]) == (1, 0)
    (step,) = said["steps"]
    assert (step["step"], step["identical"], step["tolerance"]) == (3, True, None)
    assert {quantity["verdict"] for quantity in step["quantities"]} == {"equal"}


def test_a_run_that_was_exported_and_imported_elsewhere_is_rebuilt_there(run: Run) -> None:
    file = str(run.place / "r.zip")
    assert main(["export", "r", "--store", run.store, "-o", file]) == 0
    (run.place / "store.db").unlink()
    assert main(["import", file, "--store", run.store]) == 0
    assert run.command("--all") == 0


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_step_of_two_ranks_is_rebuilt_by_two_bit_for_bit_and_by_one_nearly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path)
    config = CONFIG.model_copy(update={"learner_ranks": 2, "steps": 2, "evaluate_every": 2})
    train(run, config, [AllRanks])
    comparison = run.rebuild(2).comparison
    assert (comparison.identical, comparison.tolerance) == (True, None)
    assert run.command("--all", "--ranks", "1") == 0
    assert "step 2: the same within 0.0001" in capsys.readouterr().out


# --- what differs ----------------------------------------------------------------------------------------------------


def test_a_reward_changed_in_the_store_is_named(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    def other(data: EventData) -> EventData | None:
        return data.model_copy(update={"reward": 0.5}) if isinstance(data, RewardGiven) else None

    run.change(episode_log(EPISODE), other)
    assert run.command("--step", "2") == 1
    said = capsys.readouterr().out
    assert "step 2: DIFFERENT in rewards" in said
    assert f"episode {EPISODE} has the reward 0.5 in its log, and had 0.0 when" in said
    assert "likely cause: the store's copy of its log was changed" in said


def test_a_token_changed_in_the_store_is_named_with_its_row(run: Run) -> None:
    def other(data: EventData) -> EventData | None:
        return (
            data.model_copy(update={"token_ids": (7,)})
            if isinstance(data, ModelCompleted)
            else None
        )

    run.change(episode_log(EPISODE), other)
    first = run.rebuild(2).comparison.first
    assert first is not None
    assert first.name == "rows"
    assert first.difference == (
        f"row 2 of 8, {EPISODE}/solver/0, is not the one that was trained:"
        " token_ids[3] is 11 there, and 7 in the log"
    )


def test_a_row_changed_in_the_rollouts_collection_is_named(run: Run) -> None:
    run.execute("UPDATE rollouts SET reward = 9 WHERE episode_id = ?", [(EPISODE,)])
    first = run.rebuild(2).comparison.first
    assert first is not None
    assert first.name == "rows in the rollouts collection"
    assert "reward is 9.0 there, and 0.0 in the log" in str(first.difference)


def test_another_advantage_than_the_one_that_the_run_began_with_is_named(run: Run) -> None:
    def other(data: EventData) -> EventData | None:
        if not isinstance(data, RunStarted):
            return None
        learner = {**CONFIG.learner.model_dump(mode="json"), "advantage": "rloo"}
        return data.model_copy(update={"config": {**data.config, "learner": learner}})

    run.change(run_log("r"), other)
    first = run.rebuild(2).comparison.first
    assert first is not None
    assert first.name == "advantages"
    assert "row 1 of 8, r.g00004.0.1/solver/0, had the advantage 1.499997, and has 1" in str(
        first.difference
    )
    assert str(first.cause).startswith(
        "the run was trained with learner.advantage=grpo, and its log begins with rloo"
    )


def test_a_rate_that_was_changed_before_a_resume_is_named(run: Run) -> None:
    def other(data: EventData) -> EventData | None:
        if not isinstance(data, RunStarted):
            return None
        learner = {**CONFIG.learner.model_dump(mode="json"), "lr": 0.5}
        return data.model_copy(update={"config": {**data.config, "learner": learner}})

    run.change(run_log("r"), other)
    first = run.rebuild(1).comparison.first
    assert first is not None
    assert (first.name, first.difference) == ("actor/lr", "it was 0.001, and is 0.5")
    assert str(first.cause).startswith("learner.lr or learner.warmup_steps was changed")


def test_other_weights_are_named_by_the_first_parameter_with_another_gradient(run: Run) -> None:
    weights = load_file(run.model / "model.safetensors")
    save_file(
        {name: 1.5 * tensor for name, tensor in weights.items()},
        run.model / "model.safetensors",
        metadata={"format": "pt"},
    )
    first = run.rebuild(2).comparison.first
    assert first is not None
    assert first.name == "norms of the gradient's parts"
    assert "that of model.embed_tokens.weight had the norm" in str(first.difference)
    assert "the weights are others" in str(first.cause)


@pytest.mark.parametrize("off, code", [(1e-5, 0), (0.1, 1)])
def test_numbers_of_another_machine_may_be_off_by_what_another_order_of_sums_makes(
    run: Run, capsys: pytest.CaptureFixture[str], off: float, code: int
) -> None:
    def other(data: EventData) -> EventData | None:
        if not isinstance(data, StepFinished):
            return None
        metrics = {**data.metrics, "actor/entropy": data.metrics["actor/entropy"] * (1 + off)}
        elsewhere = {**data.computed_with, "torch": "1.0"}
        return data.model_copy(update={"metrics": metrics, "computed_with": elsewhere})

    run.change(run_log("r"), other)
    assert run.command() == code
    said = capsys.readouterr().out
    assert f"computed then with torch 1.0, and now {torch.__version__}" in said
    assert ("the same within 0.0001" if code == 0 else "DIFFERENT in actor/entropy") in said


def test_a_run_that_recorded_only_metrics_is_checked_by_them(run: Run) -> None:
    def other(data: EventData) -> EventData | None:
        if not isinstance(data, StepFinished):
            return None
        return StepFinished(step=data.step, metrics=data.metrics)

    run.change(run_log("r"), other)
    comparison = run.rebuild(2).comparison
    assert comparison.identical
    verdicts = {quantity.name: quantity.verdict for quantity in comparison.quantities}
    assert verdicts["rows"] == verdicts["advantages"] == "not recorded"
    assert verdicts["actor/loss"] == verdicts["reward/mean"] == "equal"


# --- what is missing -------------------------------------------------------------------------------------------------


def test_without_its_checkpoints_a_step_is_rebuilt_from_the_first_one(run: Run) -> None:
    shutil.rmtree(run.folder / "checkpoints")
    comparison = run.rebuild(4).comparison
    assert comparison.identical
    assert comparison.weights.endswith("model, and 3 more steps")


def lose_nothing(run: Run) -> None:
    assert run.model.exists()


def lose_the_model(run: Run) -> None:
    shutil.rmtree(run.model)


def lose_an_episode(run: Run) -> None:
    run.execute("DELETE FROM events WHERE log = ?", [(episode_log(EPISODE),)])


def lose_the_end_of_the_step(run: Run) -> None:
    delete = "DELETE FROM events WHERE log = ? AND instr(body, CAST('step.finished' AS BLOB))"
    run.execute(delete, [(run_log("r"),)])


def damage_the_checkpoint(run: Run) -> None:
    (run.folder / "checkpoints" / "step-00000002" / "optimizer.pt").write_bytes(b"")


@pytest.mark.parametrize(
    "lose, step, why",
    [
        (lose_the_model, "2", "the model that run r began with is not there: "),
        (lose_an_episode, "2", f"step 2 of run r: episode {EPISODE} of its batch is not in sqlite"),
        (lose_the_end_of_the_step, "2", "step 2 of run r is not finished"),
        (damage_the_checkpoint, "3", "step-00000002 is no checkpoint that can be read"),
        (lose_nothing, "9", "run r has no step 9; its last is 4"),
        (lose_nothing, "0", "--step 0: the first step is 1"),
    ],
)
def test_what_is_missing_is_said_in_one_line(
    run: Run, capsys: pytest.CaptureFixture[str], lose: Callable[[Run], None], step: str, why: str
) -> None:
    lose(run)
    assert run.command("--step", step) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("aworld: error: ")
    assert why in line


def test_a_run_that_is_no_training_has_no_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def other_run() -> str:
        url = f"sqlite:///{tmp_path}/store.db"
        event = Event.of(RunStarted(kind="run"), source="run/q", run_id="q").at(1)
        async with open_store(url) as store:
            await store.put_events(run_log("q"), [event])
            await store.put_run(RunRecord(id="q", kind="run", started=event.time))
        return url

    store = asyncio.run(other_run())
    for name, why in [
        ("q", "run q is no training but 'run': it has no steps"),
        ("last", "no training run in"),
        ("x", "no run 'x' in"),
    ]:
        assert main(["replay-step", name, "--store", store]) == 2
        assert why in capsys.readouterr().err


def test_without_its_extra_it_says_which_one_it_needs() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from aworld_runtime.cli.command_line import main; sys.exit(main(['replay-step', 'r']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "aworld: error: training needs the extra 'train' (torch is missing): pip install 'aworld-rt[train]'\n"
    )
