"""The end of a run: its numbers, and the files that people and programs read.

Everything is read from the store, an episode at a time: a run never has to fit in memory.
"""

# pyarrow has no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence

import pyarrow as pa
from pyarrow import parquet

from aworld_runtime.bus.base import read_all
from aworld_runtime.events import Event
from aworld_runtime.messages import Data
from aworld_runtime.names import episode_log, run_log
from aworld_runtime.store.base import RolloutRow, Store
from aworld_runtime.store.open import open_store
from aworld_runtime.training.datasets import preference_records, sft_records, write_jsonl
from aworld_runtime.training.projection import rows_of
from aworld_runtime.training.report import (
    HeldOut,
    RunReport,
    StepRow,
    Totals,
    choose_examples,
    render,
)
from aworld_runtime.training.rows import TrainingRow, row_ids
from aworld_runtime.training.run_folder import RunFolder
from aworld_runtime.training.run_state import Group, RunState
from aworld_runtime.training.task import find_task
from aworld_runtime.trajectory import Episode, episode_of

SFT_MIN_REWARD = 0.9
PREFERENCE_MIN_GAP = 0.3


class RunSummary(Data):
    """What came of a training run."""

    run_id: str
    folder: str
    steps: int
    reward_before: float | None
    """Held-out mean before the first step; None where nothing was evaluated."""
    reward_after: float | None
    """Held-out mean after the last step."""
    episodes: int
    seconds: float
    report: str
    model: str

    def text(self) -> str:
        return (
            f"held-out reward {_number(self.reward_before)} → {_number(self.reward_after)} in {self.steps} steps,"
            f" {self.seconds:.0f} s, {self.episodes} episodes\nmodel:  {self.model}\nreport: {self.report}"
        )


def _number(reward: float | None) -> str:
    return "–" if reward is None else f"{reward:.3f}"


async def episodes_of(store: Store, names: Iterable[str]) -> AsyncIterator[Episode]:
    for name in names:
        if events := await read_all(store, episode_log(name)):
            yield episode_of(events)


async def write_results(folder: RunFolder, store_url: str) -> RunSummary:
    """Write the run's report and data sets into its folder; returns the gist."""
    async with open_store(store_url) as store:
        events = await read_all(store, run_log(folder.run_id))
        state = RunState.of(events)
        totals = await _write_training_data(folder, store, state)
        report = await _report(folder, store, events, totals)
    with (folder.path / "metrics.jsonl").open("w") as metrics:
        for row in report.steps:
            metrics.write(json.dumps({"step": row.step, **row.metrics}) + "\n")
    (folder.path / "report.json").write_text(report.model_dump_json(indent=2) + "\n")
    folder.report.write_text(render(report))
    return RunSummary(
        run_id=folder.run_id,
        folder=str(folder.path),
        steps=max(state.steps, default=0),
        reward_before=report.held_out[0].reward if report.held_out else None,
        reward_after=report.held_out[-1].reward if report.held_out else None,
        episodes=report.totals.episodes,
        seconds=report.seconds,
        report=str(folder.report),
        model=str(folder.model),
    )


async def _write_training_data(folder: RunFolder, store: Store, state: RunState) -> Totals:
    """Training rows into store and Parquet, conversations into JSONL, group by group; counts on the way."""
    roles = find_task(folder.config.task).roles
    totals = Totals(retries=sum(a - 1 for g in state.groups.values() for a in g.attempts.values()))
    sft, preferences = folder.path / "sft.jsonl", folder.path / "preferences.jsonl"
    for file in (sft, preferences):
        write_jsonl(file, [])
    with parquet.ParquetWriter(folder.path / "rollouts.parquet", ROLLOUTS) as writer:
        for group in state.groups.values():
            names = group.completed.episodes if group.completed else ()
            episodes = [episode async for episode in episodes_of(store, names)]
            totals = _count(totals, episodes)
            if group.requested.purpose == "train":
                rows = [row for episode in episodes for row in rows_of(episode, roles)]
                stored = list(_stored(folder.run_id, rows))
                await store.put_rollouts(stored)
                writer.write_table(_table(stored))
                good = sft_records(episodes, roles=roles, min_reward=SFT_MIN_REWARD)
                pairs = preference_records(episodes, roles=roles, min_gap=PREFERENCE_MIN_GAP)
                write_jsonl(sft, good, append=True)
                write_jsonl(preferences, pairs, append=True)
    return totals


def _count(totals: Totals, episodes: Sequence[Episode]) -> Totals:
    return totals.model_copy(
        update={
            "episodes": totals.episodes + len(episodes),
            "prompt_tokens": totals.prompt_tokens + sum(e.usage.prompt_tokens for e in episodes),
            "sampled_tokens": totals.sampled_tokens
            + sum(e.usage.completion_tokens for e in episodes),
            "tool_calls": totals.tool_calls + sum(e.tool_calls for e in episodes),
        }
    )


async def _report(
    folder: RunFolder, store: Store, events: Sequence[Event], totals: Totals
) -> RunReport:
    state = RunState.of(events)
    config = folder.config
    records = await store.episodes(run_id=folder.run_id, limit=1_000_000)
    steps = sorted(state.evaluations)
    before, after = (
        [
            [
                e
                async for e in episodes_of(
                    store, _finished(state.groups, state.evaluations[step].groups)
                )
            ]
            for step in (steps[0], steps[-1])
        ]
        if steps
        else ([], [])
    )
    return RunReport(
        run_id=folder.run_id,
        task=config.task,
        status=state.finished.reason if state.finished else "stopped",
        model=folder.wiring.model,
        sampler=folder.wiring.sampler,
        workers=config.worker_num,
        seconds=(events[-1].time - events[0].time).total_seconds() if events else 0.0,
        config=config.shown(),
        steps=tuple(StepRow(step=s, metrics=state.steps[s].metrics) for s in sorted(state.steps)),
        held_out=tuple(
            HeldOut(
                step=s,
                reward=state.evaluations[s].metrics["reward/mean"],
                episodes=int(state.evaluations[s].metrics["episodes"]),
                seconds=state.evaluations[s].metrics["perf/evaluate_s"],
            )
            for s in steps
        ),
        examples=choose_examples(
            before,
            after,
            role=find_task(config.task).roles[0],
            steps=(steps[0], steps[-1]) if steps else (0, 0),
        ),
        totals=totals.model_copy(update={"takeovers": sum(record.takeovers for record in records)}),
        provenance=folder.provenance,
    )


def _finished(groups: dict[str, Group], names: Iterable[str]) -> list[str]:
    return [e for n in names if (done := groups[n].completed) for e in done.episodes]


ROLLOUTS = pa.schema(
    [
        ("id", pa.string()),
        ("run_id", pa.string()),
        ("group_id", pa.string()),
        ("episode_id", pa.string()),
        ("role", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("behavior_logprobs", pa.list_(pa.float32())),
        ("policy", pa.string()),
        ("policy_version", pa.int64()),
        ("reward", pa.float64()),
        ("weight", pa.float64()),
    ]
)
"""Columns of rollouts.parquet: the fields of `RolloutRow`."""


def _stored(run_id: str, rows: Sequence[TrainingRow]) -> Iterator[RolloutRow]:
    for name, row in zip(row_ids(rows), rows, strict=True):
        yield RolloutRow(
            id=name,
            run_id=run_id,
            group_id=row.group_id,
            episode_id=row.rollout_id.rpartition("/")[0],
            role=row.role,
            token_ids=row.token_ids,
            loss_mask=row.loss_mask,
            behavior_logprobs=row.behavior_logprobs,
            policy=row.policy,
            policy_version=row.policy_version,
            reward=row.reward,
            weight=row.weight,
        )


def _table(rows: Sequence[RolloutRow]) -> pa.Table:
    return pa.Table.from_pylist([row.__dict__ for row in rows], schema=ROLLOUTS)
