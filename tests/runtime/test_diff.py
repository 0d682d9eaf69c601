"""What two episodes, or two runs, did otherwise: as a person sees it, without what differs between any two."""

import json
import uuid
from pathlib import Path

import pytest
from anyio import to_thread

from aworld_runtime import Agent, Runtime
from aworld_runtime.bus.base import read_all
from aworld_runtime.bus.open import open_bus
from aworld_runtime.cli import main
from aworld_runtime.events import (
    EpisodeClaimed,
    EpisodeForked,
    EpisodeRequested,
    EpisodeTakenOver,
    Event,
    ModelCompleted,
    ModelRequested,
    RewardGiven,
    ToolCalled,
    ToolReturned,
)
from aworld_runtime.messages import ToolCall, Usage
from aworld_runtime.models.base import ModelRequest
from aworld_runtime.models.scripted import Reply, ScriptedModel
from aworld_runtime.names import episode_log
from aworld_runtime.replay.diff import Call, EpisodeDiff, compare_episodes
from aworld_runtime.replay.diff_runs import compare_runs
from aworld_runtime.store import EpisodeRecord
from tests.episodes import Adder, request_episode, run_episode
from tests.handmade import Log, at


def calling(*expressions: tuple[int, int]) -> Agent:
    """Makes these calls, one a turn, under ids of its own, and answers with the last result."""

    def reply(request: ModelRequest) -> Reply:
        results = [m.content for m in request.messages if m.role == "tool"]
        if len(results) == len(expressions):
            return f"It is {results[-1]}."
        a, b = expressions[len(results)]
        return ToolCall(id=uuid.uuid4().hex, name="add", arguments={"a": a, "b": b})

    return Agent("solver", llm=ScriptedModel(reply), tools=[Adder()])


async def record(agent: Agent, prompt: str = "Add.") -> list[Event]:
    async with open_bus("memory://") as bus:
        return await run_episode(bus, request_episode(prompt), agent.program())


def call_text(call: Call | None) -> str:
    return f"{call.arguments} {call.answer}" if call else ""


def changes(found: EpisodeDiff, role: str = "solver") -> list[tuple[str, str, str]]:
    """What became of calls: how they differ, and their arguments and answers in A and B."""
    (of_role,) = (r for r in found.roles if r.role == role)
    return [(c.change, call_text(c.a), call_text(c.b)) for c in of_role.calls]


async def test_two_runs_of_the_same_do_not_differ() -> None:
    one, two = [await record(calling((1, 2), (3, 4))) for _ in range(2)]
    found = compare_episodes(one, two)
    assert found.same, found.first
    assert (found.shared, found.first, found.request) == (0, None, ())
    assert 5 < found.alike < len(one)
    assert changes(found) == []


async def test_the_first_difference_and_every_call_that_differs_are_found() -> None:
    found = compare_episodes(
        await record(calling((1, 2), (3, 4), (5, 6))),
        await record(calling((1, 2), (3, 9), (5, 6), (7, 8))),
    )
    assert not found.same
    assert found.first is not None
    assert (found.first.role, found.first.a) == ("solver", found.first.b)
    assert found.first.what == "model.completed differs in data.tool_calls"
    a, b = found.first.recorded
    assert '"b": 4' in a
    assert '"b": 9' in b
    assert changes(found) == [
        ("arguments", '{"a": 3, "b": 4} 7', '{"a": 3, "b": 9} 12'),
        ("added", "", '{"a": 7, "b": 8} 15'),
    ]
    (solver,) = (role for role in found.roles if role.role == "solver")
    assert (solver.a.turns, solver.b.turns) == (4, 5)
    assert (solver.a.calls, solver.b.calls) == (3, 4)
    assert (found.a.answer, found.b.answer) == ("It is 11.", "It is 15.")


def a_log(*, taken_over: bool = False, answer: str = "3", ends: bool = True) -> list[Event]:
    """One turn with a call; perhaps by two workers."""
    log = Log()
    log.add("worker", EpisodeClaimed(worker="w1"), log.requested)
    posted = log.asked("solver", log.requested)
    asked = log.add(
        "solver", ModelRequested(model="m", prompt_sha256="x", sources=(posted.seq,)), posted
    )
    if taken_over:
        log.add("worker", EpisodeTakenOver(worker="w2"), log.requested)
    call = ToolCall(id="c1", name="add", arguments={"a": 1})
    usage = Usage(prompt_tokens=10, completion_tokens=5)
    said = ModelCompleted(tool_calls=(call,), usage=usage)
    log.add("solver", said, posted, asked)
    called = log.add("solver", ToolCalled(call=call), posted)
    returned = log.add("add", ToolReturned(name="add", content=answer), called, called, to="solver")
    log.add(
        "solver",
        ModelRequested(model="m", prompt_sha256="y", previous=asked.seq, sources=(returned.seq,)),
        returned,
    )
    if ends:
        log.add("environment", RewardGiven(reward=float(answer == "3")), log.requested)
        log.finished()
    return log.events


def test_a_takeover_shifts_every_seq_and_is_no_difference() -> None:
    found = compare_episodes(a_log(), a_log(taken_over=True))
    assert found.same, found.first


def test_another_answer_of_a_tool_is_told_with_tokens_times_and_rewards() -> None:
    found = compare_episodes(a_log(), a_log(answer="4", taken_over=True))
    assert found.first is not None
    assert (found.first.role, found.first.a, found.first.b) == ("add", 7, 8)
    assert found.first.what == "tool.returned differs in data.content"
    assert changes(found) == [("answer", '{"a": 1} 3', '{"a": 1} 4')]
    (solver,) = (role for role in found.roles if role.role == "solver")
    assert solver.a.tokens == 15
    assert (solver.a.seconds, solver.b.seconds) == (2.0, 3.0)
    assert (found.a.reward, found.b.reward) == (1.0, 0.0)


def test_what_is_open_at_a_fork_takes_its_time_from_there() -> None:
    one = Log()
    one.add("worker", EpisodeClaimed(worker="w1"), one.requested)
    call = ToolCall(id="c1", name="add", arguments={"a": 1})
    called = one.add("solver", ToolCalled(call=call), one.requested)
    later = at(3600)
    one.add("runtime", EpisodeForked(parent="episode:e1", at=3), None, time=later)
    one.add("runtime", one.requested.data, None, time=later)
    one.add("worker", EpisodeClaimed(worker="w2"), one.requested, time=later)
    answer = ToolReturned(name="add", content=3)
    one.add("add", answer, called, called, to="solver", time=at(3602))
    (solver,) = compare_episodes(one.events, one.events).roles
    assert solver.a.seconds == 2.0


def test_a_history_that_goes_on_alone_is_told() -> None:
    found = compare_episodes(a_log(), a_log(ends=False))
    assert found.first is not None
    assert found.first.b is None
    assert found.first.what == "only A goes on, with reward.given"
    assert (found.a.status, found.b.status) == ("answered", None)


def test_what_was_asked_for_is_compared_but_not_its_seed() -> None:
    one, two = a_log(), a_log()
    (requested, *rest) = two
    assert isinstance(requested.data, EpisodeRequested)

    def with_request(**fields: object) -> list[Event]:
        data = requested.data.model_copy(update=fields)
        return [requested.model_copy(update={"data": data}), *rest]

    assert compare_episodes(one, with_request(seed=8, index=3)).same
    found = compare_episodes(one, with_request(program="my.agents:other"))
    assert not found.same
    assert found.first is None
    assert found.request == ('program: "my.agents:solver" is now "my.agents:other"',)


async def test_a_fork_shares_events_with_its_parent(tmp_path: Path) -> None:
    async with Runtime(store=f"sqlite:///{tmp_path}/store.db") as runtime:
        parent = (await runtime.run(calling((1, 2), (3, 4)), "Add.")).id
        log = await read_all(runtime.bus, episode_log(parent))
        at = next(e.seq for e in log if isinstance(e.data, ToolReturned)) - 1
        edit = {"data.content": "100"}
        forked = await runtime.fork(parent, at=at, edit=edit, program=calling((1, 2), (3, 4)))
        await runtime.result(forked)
        history = await read_all(runtime.bus, episode_log(forked))
    found = compare_episodes(log, history)
    assert (found.shared, found.alike, found.request) == (at, 0, ())
    assert found.first is not None
    assert (found.first.a, found.first.b) == (at + 1, at + 3)
    assert found.first.what == "tool.returned differs in data.content"
    assert changes(found) == [("answer", '{"a": 1, "b": 2} 3', '{"a": 1, "b": 2} 100')]


# --- runs ----------------------------------------------------------------------------------------------------------


def outcome(name: str, task: str | None, **fields: object) -> EpisodeRecord:
    given: dict[str, object] = {"id": name, "task_id": task, "status": "answered"}
    return EpisodeRecord.model_validate(given | fields)


def test_runs_are_compared_by_task_index_and_last_attempt_largest_change_first() -> None:
    one = [
        outcome("a1", "t1", group_id="g1", reward=0.5, answer="x"),
        outcome("a2", "t1", group_id="g1", index=1, reward=1.0),
        outcome("a3", "t2", group_id="g2", reward=None, status="failed"),
        outcome("a4", "t2", group_id="g2", attempt=2, reward=0.0),
        outcome("a5", "t1", group_id="g3", reward=0.25),
        outcome("a6", "t3"),
    ]
    two = [
        outcome("b1", "t1", group_id="h1", reward=0.25, answer="x"),
        outcome("b2", "t1", group_id="h1", index=1, reward=1.0),
        outcome("b4", "t2", group_id="h2", reward=1.0),
        outcome("b5", "t1", group_id="h3", reward=0.25, answer="y"),
        outcome("b7", "t4"),
    ]
    found = compare_runs("a", "b", one, two)
    assert [(c.a.episode, c.b.episode) for c in found.changed] == [
        ("a4", "b4"),
        ("a1", "b1"),
        ("a5", "b5"),
    ]
    assert (found.pairs, found.only_a, found.only_b) == (4, ("a6",), ("b7",))
    assert found.rewards == (0.4375, 0.625)
    assert compare_runs("a", "a", one, one).same


def test_runs_whose_tasks_have_names_of_chance_are_paired_in_order() -> None:
    one, two = [outcome("a1", "x1"), outcome("a2", "x2")], [outcome("b1", "y1")]
    found = compare_runs("a", "b", one, two)
    assert (found.pairs, found.changed, found.only_a) == (1, (), ("a2",))


# --- the command ---------------------------------------------------------------------------------------------------


async def test_the_command_is_0_for_the_same_1_for_others_and_2_for_what_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"sqlite:///{tmp_path}/store.db"

    runs: list[str] = []
    episodes: list[str] = []
    for agent in (calling((1, 2)), calling((1, 2)), calling((1, 3))):
        async with Runtime(store=url) as runtime:
            runs.append(runtime.run_id)
            episodes.append((await runtime.run(agent, "Add.")).id)

    async def diff(*arguments: str) -> tuple[int, str, str]:
        code = await to_thread.run_sync(main, ["diff", *arguments, "--store", url])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    one, two, three = episodes
    code, printed, _ = await diff(one, two)
    assert (code, printed.splitlines()[-1]) == (0, "no difference")
    code, printed, _ = await diff(one, three)
    assert code == 1
    assert "first difference, of solver: model.completed differs in data.tool_calls" in printed
    assert 'add: {"a": 1, "b": 2} in A, {"a": 1, "b": 3} in B' in printed
    assert "'It is 3.' → 'It is 4.'" in printed
    code, printed, _ = await diff(one, three, "--json")
    assert (code, json.loads(printed)["same"]) == (1, False)
    assert (await diff(*runs[:2]))[0] == 0
    code, printed, _ = await diff(runs[0], runs[2])
    assert code == 1
    assert "another outcome: 1" in printed
    code, printed, error = await diff(one, "nowhere")
    assert (code, printed) == (2, "")
    assert "no episode 'nowhere'" in error
    assert (await diff(one, runs[0]))[0] == 2
