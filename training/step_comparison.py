"""A step as it was recorded and as it was taken again: what is equal, where the first difference is, and its likely cause.

Pure. What only reads the record (rewards, rows, advantages, what the rollouts were like) must be equal to the last bit.
What the model computed must be so too where it was computed with the same; elsewhere sums are taken in another order, and
it has to be within `TOLERANCE`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Literal, cast

from aworld_runtime.events import StepFinished
from aworld_runtime.messages import Data
from aworld_runtime.training.advantages import ADVANTAGES, row_advantages
from aworld_runtime.training.config import TrainConfig
from aworld_runtime.training.recorded_run import RecordedStep
from aworld_runtime.training.rows import TrainingRow, row_ids
from aworld_runtime.version import code_version

Verdict = Literal["equal", "close", "different", "not recorded"]

TOLERANCE: Mapping[str, float] = {"float32": 1e-4, "bfloat16": 2e-2}
"""By `learner.dtype`: how far apart, relative to the larger one, two numbers of a model may be where another processor,
version, or number of threads or ranks took the sums."""
LEAST = 0.1
"""Metrics below are compared as if they were this large: a loss is a difference, and near 0."""
COMPUTED = "actor/"
"""Metrics that the model computed."""
NOT_COMPARED = ("perf/", "batch/packed_tokens")
"""Metrics that say how the work was done, and not what came of it."""
SETTINGS = {
    "actor/lr": "learner.lr or learner.warmup_steps",
    "actor/optimizer_steps": "learner.minibatch_rows",
}
"""Metrics that follow from settings alone."""


class Quantity(Data):
    """One thing that was recorded, and the same again: a metric, or how many there are of a kind."""

    name: str
    recorded: float | None
    """None: it was not."""
    rebuilt: float | None
    verdict: Verdict
    differing: int = 0
    """How many of the kind."""
    difference: str | None = None
    """Where it is different: where first, with both values."""
    cause: str | None = None
    """The likely one."""


class GroupAgain(Data):
    """A group of the batch; one entry a rollout."""

    group: str
    rollouts: tuple[str, ...]
    rewards: tuple[float, ...]
    advantages: tuple[float, ...]


class StepComparison(Data):
    """What came of taking one step again."""

    run: str
    step: int
    weights: str
    """Where those before the step came from."""
    tolerance: float | None
    """Of what the model computed; None is bit for bit."""
    other: tuple[str, ...]
    """What it was computed with then and now, where that is not the same."""
    quantities: tuple[Quantity, ...]
    """Each follows from those before it."""
    groups: tuple[GroupAgain, ...]

    @property
    def first(self) -> Quantity | None:
        """The first that is different."""
        return next((one for one in self.quantities if one.verdict == "different"), None)

    @property
    def identical(self) -> bool:
        """Nothing is different; what the model computed may be within the tolerance."""
        return self.first is None


def compare(
    run_id: str,
    recorded: RecordedStep,
    again: StepFinished,
    *,
    config: TrainConfig,
    parameters: Sequence[str],
    weights: str,
) -> StepComparison:
    """The step as recorded, and `again`; `parameters` names those that its gradient norms are about."""
    comparison = _Comparison(recorded, again, config, parameters)
    return StepComparison(
        run=run_id,
        step=again.step,
        weights=weights,
        tolerance=comparison.tolerance,
        other=comparison.other,
        quantities=tuple(comparison.quantities()),
        groups=tuple(_groups(recorded.rows, again.advantages)),
    )


class _Comparison:
    def __init__(
        self,
        recorded: RecordedStep,
        again: StepFinished,
        config: TrainConfig,
        parameters: Sequence[str],
    ) -> None:
        self._recorded = recorded
        self._was = recorded.finished
        self._again = again
        self._config = config
        self._parameters = parameters
        self._names = row_ids(recorded.rows)
        self.other = _differing(self._was.computed_with, again.computed_with)
        same = self._was.computed_with and not self.other
        self.tolerance = None if same else TOLERANCE[config.learner.dtype]

    def quantities(self) -> Iterator[Quantity]:
        yield self._rewards()
        yield self._rows()
        yield self._stored_rows()
        yield from self._metrics(computed=False)
        yield self._advantages()
        yield self._gradient_norms()
        yield from self._metrics(computed=True)

    # --- what the record says --------------------------------------------------------------------------------------

    def _rewards(self) -> Quantity:
        was = {
            episode: reward
            for group in self._recorded.groups
            for episode, reward in zip(group.episodes, group.rewards, strict=True)
        }
        others = [e for e in self._recorded.episodes if e.reward != was[e.id]]
        how = None
        if others:
            one = others[0]
            how = (
                f"episode {one.id} has the reward {one.reward} in its log, and had {was[one.id]}"
                " when its group was completed"
            )
        cause = "the store's copy of its log was changed"
        return _counted("rewards", len(was), len(was), len(others), how, cause)

    def _rows(self) -> Quantity:
        was, again = self._was.rows, self._again.rows
        if not self._was.computed_with:
            return _not_recorded("rows", len(again))
        others = [i for i, (a, b) in enumerate(zip(was, again, strict=False)) if a != b]
        how, cause = None, self._changed("the code that makes rows of episodes")
        if len(was) != len(again):
            how = f"the batch had {len(was)} rows, and its episodes make {len(again)}"
        elif others:
            how = f"{self._row(others[0])} is not the one that was trained"
            if (kept := self._recorded.stored_otherwise.get(others[0])) is not None:
                how += f": {_first_difference(kept, self._recorded.rows[others[0]])}"
            cause = f"the store's copy of its episode's log was changed; or {cause}"
        return _counted("rows", len(was), len(again), len(others), how, cause)

    def _stored_rows(self) -> Quantity:
        name = "rows in the rollouts collection"
        stored, others = self._recorded.stored, self._recorded.stored_otherwise
        if not stored:
            return _not_recorded(name, len(self._recorded.rows))
        how = None
        if others:
            index = min(others)
            differs = _first_difference(others[index], self._recorded.rows[index])
            how = f"{self._row(index)} is another there: {differs}"
        cause = "the collection was changed, or the logs that it was made of"
        return _counted(name, stored, stored, len(others), how, cause)

    def _advantages(self) -> Quantity:
        was, again = self._was.advantages, self._again.advantages
        if not self._was.computed_with:
            return _not_recorded("advantages", len(again))
        others = [i for i, (a, b) in enumerate(zip(was, again, strict=False)) if a != b]
        how = cause = None
        if len(was) != len(again):
            how = f"{len(was)} were recorded, and there are {len(again)}"
            cause = "the batch has other rows"
        elif others:
            one = others[0]
            how = f"{self._row(one)} had the advantage {was[one]:.7g}, and has {again[one]:.7g}"
            cause = self._other_advantage() or self._changed("the code that computes advantages")
        return _counted("advantages", len(was), len(again), len(others), how, cause)

    def _other_advantage(self) -> str | None:
        """Whether another estimator gives what was recorded."""
        began_with = self._config.learner.advantage
        for name, advantage in ADVANTAGES.items():
            values = row_advantages(self._recorded.rows, advantage=advantage).values
            rounded = StepFinished(step=0, metrics={}, advantages=values).advantages
            if rounded == self._was.advantages:
                return (
                    f"the run was trained with learner.advantage={name}, and its log begins with {began_with}:"
                    " its config.yaml was changed before a resume"
                )
        return None

    # --- what the model computed -----------------------------------------------------------------------------------

    def _gradient_norms(self) -> Quantity:
        was, again = self._was.gradient_norms, self._again.gradient_norms
        name = "norms of the gradient's parts"
        if not self._was.computed_with:
            return _not_recorded(name, len(again))
        if len(was) != len(again):
            how = f"{len(was)} were recorded, and there are {len(again)}"
            cause = "another model, or another number of optimizer steps"
            return _counted(name, len(was), len(again), 0, how, cause)
        least = max(was, default=0.0)
        others = [i for i, (a, b) in enumerate(zip(was, again, strict=True)) if a != b]
        far = [i for i in others if not self._near(was[i], again[i], least)]
        how = None
        if far:
            parameter = self._parameters[far[0] % len(self._parameters)]
            how = f"that of {parameter} had the norm {was[far[0]]:.7g}, and has {again[far[0]]:.7g}"
        found = _counted(name, len(was), len(again), len(far), how, self._other_weights())
        return found.model_copy(update={"verdict": "close"}) if others and not far else found

    def _metrics(self, *, computed: bool) -> Iterator[Quantity]:
        was, again = self._was.metrics, self._again.metrics
        for name in sorted(was.keys() | again.keys()):
            by_model = name.startswith(COMPUTED) and name not in SETTINGS
            if not name.startswith(NOT_COMPARED) and by_model == computed:
                yield self._metric(name, was.get(name), again.get(name), computed=computed)

    def _metric(
        self, name: str, was: float | None, again: float | None, *, computed: bool
    ) -> Quantity:
        how = cause = None
        if was is None:
            verdict = "not recorded"
        elif again is not None and (was == again or (math.isnan(was) and math.isnan(again))):
            verdict = "equal"
        elif computed and again is not None and self._near(was, again, LEAST):
            verdict = "close"
        else:
            verdict = "different"
            how = f"it was {was!r}, and is {again!r}"
            cause = self._other_weights() if computed else self._other_record(name)
        return Quantity(
            name=name, recorded=was, rebuilt=again, verdict=verdict, difference=how, cause=cause
        )

    def _near(self, one: float, two: float, least: float) -> bool:
        if self.tolerance is None:
            return False
        return abs(one - two) <= self.tolerance * max(abs(one), abs(two), least)

    # --- words -----------------------------------------------------------------------------------------------------

    def _row(self, index: int) -> str:
        return f"row {index + 1} of {len(self._names)}, {self._names[index]},"

    def _changed(self, what: str) -> str:
        was, now = self._recorded.code_version, code_version()
        versions = f": the run had version {was}, and this is {now}" if was and was != now else ""
        return f"{what} has changed{versions}"

    def _other_record(self, metric: str) -> str:
        if metric in SETTINGS:
            return f"{SETTINGS[metric]} was changed in the run's config.yaml before a resume"
        return f"the store's copy of an episode's log was changed; or {self._changed('the code that counts')}"

    def _other_weights(self) -> str:
        return "; or ".join(
            [
                "the weights are others: its model's folder or checkpoint is not the run's own",
                *([f"it was computed with {', '.join(self.other)}"] if self.other else []),
                self._changed("the learner's code or setting"),
            ]
        )


def _groups(rows: Sequence[TrainingRow], advantages: Sequence[float]) -> Iterator[GroupAgain]:
    """Each rollout once, however many rows it has."""
    groups: dict[str, dict[str, tuple[float, float]]] = {}
    for row, advantage in zip(rows, advantages, strict=True):
        groups.setdefault(row.group_id, {})[row.rollout_id] = (row.reward, advantage)
    for name, rollouts in groups.items():
        rewards, values = zip(*rollouts.values(), strict=True)
        yield GroupAgain(group=name, rollouts=tuple(rollouts), rewards=rewards, advantages=values)


def _counted(
    name: str, recorded: int, rebuilt: int, others: int, how: str | None, cause: str | None
) -> Quantity:
    """Many of a kind, of which the first difference says `how`."""
    return Quantity(
        name=name,
        recorded=recorded,
        rebuilt=rebuilt,
        verdict="equal" if how is None else "different",
        differing=others,
        difference=how,
        cause=cause if how else None,
    )


def _not_recorded(name: str, rebuilt: int) -> Quantity:
    return Quantity(name=name, recorded=None, rebuilt=rebuilt, verdict="not recorded")


def _differing(was: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """In words; nothing where it was not recorded."""
    return tuple(
        f"{name} {was.get(name, 'unknown')}, and now {now.get(name, 'unknown')}"
        for name in sorted(was.keys() | now.keys())
        if was and was.get(name) != now.get(name)
    )


def _first_difference(stored: TrainingRow, rebuilt: TrainingRow) -> str:
    """The first field that differs, and in it the first token."""
    for one, two in zip(_items(stored), _items(rebuilt), strict=False):
        if repr(one) != repr(two):  # NaN, where masked, is NaN
            (name, there), (_, here) = one, two
            return f"{name} is {there!r} there, and {here!r} in the log"
    return "nothing differs"


def _items(row: TrainingRow) -> Iterator[tuple[str, object]]:
    """Each field, and each token of those that have one a token."""
    for name, value in asdict(row).items():
        if isinstance(value, tuple):
            tokens = cast("tuple[object, ...]", value)
            yield f"the length of {name}", len(tokens)
            yield from ((f"{name}[{index}]", token) for index, token in enumerate(tokens))
        else:
            yield name, value
