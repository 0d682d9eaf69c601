"""What a run still needs on the bus."""

from aworld_runtime.events import (
    BatchFormed,
    Event,
    EventData,
    GroupCompleted,
    GroupRequested,
    RunFinished,
    StepFinished,
)
from aworld_runtime.messages import Task
from aworld_runtime.training.untrained import Untrained


def add(untrained: Untrained, *data: EventData) -> None:
    for one in data:
        untrained.add(Event.of(one, source="trainer/r"))


def test_an_episode_is_needed_until_the_step_that_uses_its_group() -> None:
    run, task, log = Untrained(), Task(id="t", prompt="go"), "episode:r.g00001.0.1"
    assert not run.needs(log)
    add(run, GroupRequested(group="r.g00001", task=task, size=1))
    add(run, GroupCompleted(group="r.g00001", episodes=("r.g00001.0.1",), rewards=(1.0,)))
    assert run.needs(log)
    assert not run.needs("run:r")
    assert not run.needs("episode:of-no-group")
    add(run, BatchFormed(step=1, group_ids=("r.g00001",)))
    assert run.needs(log)
    add(run, StepFinished(step=1, metrics={}))
    assert not run.needs(log)


def test_a_group_to_evaluate_is_needed_until_it_is_completed_and_none_after_the_run() -> None:
    run, task = Untrained(), Task(id="t", prompt="go")
    for number, purpose in ((1, "evaluate"), (2, "train")):
        group = GroupRequested.model_validate(
            {"group": f"g{number}", "task": task, "size": 1, "purpose": purpose}
        )
        add(run, group)
    assert run.needs("episode:g1.0.1")
    add(run, GroupCompleted(group="g1", episodes=("g1.0.1",), rewards=(1.0,)))
    assert not run.needs("episode:g1.0.1")
    assert run.needs("episode:g2.0.1")
    add(run, RunFinished(reason="done"))
    assert not run.needs("episode:g2.0.1")
