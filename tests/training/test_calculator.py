"""The built-in task: which questions it asks, and what earns which part of the reward."""

import pytest

from aworld_runtime.errors import ToolError
from aworld_runtime.messages import Completion, Message, Task, ToolCall
from aworld_runtime.models import hermes
from aworld_runtime.tools.calculator import evaluate
from aworld_runtime.training.calculator import (
    CALL,
    EXAMPLE,
    SYSTEM_PROMPT,
    CalculatorEnvironment,
    judge,
)
from aworld_runtime.trajectory import Episode, Trajectory, Turn

TASK = Task(
    id="t", prompt="What is 47 + 38?", data={"left": 47, "operator": "+", "right": 38, "answer": 85}
)
RIGHT = CALL.format("47 + 38")


def trajectory(*texts: str, tool_runs: bool = True) -> Trajectory:
    """An agent that writes `texts`, one a turn; its calls are answered as the calculator would."""
    turns: list[Turn] = []
    new: tuple[Message, ...] = (
        Message(role="system", content=SYSTEM_PROMPT),
        *EXAMPLE,
        Message(role="user", content=TASK.prompt),
    )
    for number, text in enumerate(texts):
        words, calls = hermes.parse(text, id_prefix=f"{number}_")
        completion = Completion(text=words, tool_calls=calls)
        turns.append(Turn(seq=number, new_messages=new, completion=completion))
        new = tuple(result(call) for call in calls) if tool_runs else ()
    return Trajectory(role="solver", turns=tuple(turns))


def result(call: ToolCall) -> Message:
    try:
        content = str(evaluate(str(call.arguments.get("expression"))))
    except ToolError as error:
        content = f"ToolError: {error}"
    return Message(role="tool", content=content, name=call.name, tool_call_id=call.id)


@pytest.mark.parametrize(
    "texts, parts",
    [
        ((RIGHT, "<answer>85</answer>"), (0.2, 0.3, 0.1, 0.4)),
        ((CALL.format("38+47"), "So <answer> 85 </answer>"), (0.2, 0.3, 0.1, 0.4)),
        ((RIGHT, "It is 85."), (0.2, 0.3, 0, 0)),
        ((RIGHT, "<answer>84</answer>"), (0.2, 0.3, 0.1, 0)),
        ((RIGHT,), (0.2, 0.3, 0, 0)),
        ((CALL.format("80 + 5"), "<answer>85</answer>"), (0.2, 0, 0.1, 0.4)),
        ((CALL.format("85"), "<answer>85</answer>"), (0.2, 0, 0.1, 0.4)),
        ((CALL.format("47 - 38"), "<answer>9</answer>"), (0.2, 0, 0.1, 0)),
        ((CALL.format("47 +"), "<answer>9</answer>"), (0.2, 0, 0.1, 0)),
        ((CALL.format("1 + 1"), RIGHT, "<answer>85</answer>"), (0.2, 0.3, 0.1, 0.4)),
        ((RIGHT, "<answer>1</answer> no, <answer>85</answer>"), (0.2, 0.3, 0.1, 0.4)),
        ((RIGHT, "<answer>85</answer> no, <answer>1</answer>"), (0.2, 0.3, 0.1, 0)),
        (("<answer>85</answer>",), (0, 0, 0, 0)),
        ((RIGHT + "<answer>85</answer>",), (0.2, 0.3, 0, 0)),
        (("<tool_call>{oops</tool_call>", "<answer>85</answer>"), (0, 0, 0, 0)),
        (('<tool_call>{"name": "abacus"}</tool_call>', "<answer>85</answer>"), (0, 0, 0, 0)),
        (("I can't.",), (0, 0, 0, 0)),
    ],
)
def test_each_part_is_earned_on_its_own(texts: tuple[str, ...], parts: tuple[float, ...]) -> None:
    reward = judge(TASK, trajectory(*texts))
    names = ("call_parsed", "right_expression", "answer_tag", "right_answer")
    assert reward.breakdown == dict(zip(names, parts, strict=True))
    assert reward.total == pytest.approx(sum(parts), abs=1e-9)


def test_full_reward_is_exactly_one() -> None:
    assert judge(TASK, trajectory(RIGHT, "<answer>85</answer>")).total == 1.0


def test_answer_before_any_result_earns_nothing() -> None:
    """The worked example holds a result too: that one is not the agent's."""
    parts = judge(TASK, trajectory(RIGHT, "<answer>85</answer>", tool_runs=False)).breakdown
    assert parts["answer_tag"] == parts["right_answer"] == 0


async def test_episode_is_scored_by_its_solver() -> None:
    turns = trajectory(RIGHT, "<answer>85</answer>").turns
    verifier = Trajectory(role="verifier", turns=turns[1:])
    solver = Trajectory(role="solver", turns=turns)
    environment = CalculatorEnvironment()
    episode = Episode(id="e", task=TASK, trajectories=(verifier, solver))
    assert (await environment.score(TASK, episode)).total == 1.0
    empty = Episode(id="e", task=TASK)
    assert (await environment.score(TASK, empty)).total == 0.0


def test_splits_share_no_pair_of_numbers() -> None:
    environment = CalculatorEnvironment()
    pairs = [
        {frozenset((str(t.data["left"]), str(t.data["right"]))) for t in tasks}
        for tasks in (
            environment.tasks("train", count=20_000),
            environment.tasks("test", count=20_000),
        )
    ]
    assert not pairs[0] & pairs[1]
    assert 0.05 < len(pairs[1]) / (len(pairs[0]) + len(pairs[1])) < 0.15


def test_tasks_are_those_of_the_seed_and_more_of_them_only_adds() -> None:
    environment = CalculatorEnvironment()
    few = environment.tasks("train", count=5, seed=1)
    assert list(environment.tasks("train", count=50, seed=1)[:5]) == list(few)
    assert list(environment.tasks("train", count=5, seed=2)) != list(few)
    assert len({task.id for task in environment.tasks("train", count=100)}) == 100


def test_answers_are_true() -> None:
    for task in CalculatorEnvironment().tasks("test", count=50):
        question = task.prompt.removeprefix("What is ").removesuffix("?")
        assert evaluate(question) == task.data["answer"]
