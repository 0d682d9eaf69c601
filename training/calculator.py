"""The built-in task: sums that are to be worked out with the calculator, never in the head.

Two turns at least: call the tool, see its result, answer with it. A small model can't add, but it
can learn to do this; the reward has parts, so that there is something to learn from at the start.

| part | weight | given when |
|---|---|---|
| `call_parsed` | 0.2 | the agent called the calculator in the right format |
| `right_expression` | 0.3 | its last call computes the truth, from the question's own two numbers |
| `answer_tag` | 0.1 | it wrote `<answer>…</answer>` after it had seen a result |
| `right_answer` | 0.4 | the last of those answers is the truth |
"""

from __future__ import annotations

import hashlib
import itertools
import random
import re
from collections.abc import Sequence

from aworld_runtime.agents.agent import Agent
from aworld_runtime.environments.base import Reward, Split
from aworld_runtime.errors import ToolError
from aworld_runtime.messages import Message, Task, ToolCall
from aworld_runtime.tools.calculator import evaluate
from aworld_runtime.trajectory import Episode, Trajectory

ROLE = "solver"
TOOL = "calculator"

CALL = '<tool_call>{{"name": "calculator", "arguments": {{"expression": "{}"}}}}</tool_call>'

SYSTEM_PROMPT = f"Use the calculator: {CALL.format('a + b')}\nThen answer: <answer>c</answer>"

EXAMPLE = (
    Message(role="user", content="What is 52 - 17?"),
    Message(
        role="assistant",
        tool_calls=(ToolCall(id="example", name=TOOL, arguments={"expression": "52 - 17"}),),
    ),
    Message(role="tool", content="35", name=TOOL, tool_call_id="example"),
    Message(role="assistant", content="<answer>35</answer>"),
)
"""One worked example, as turns between the instructions and the question. As turns, not as text:
SmolLM2-135M then writes the exact call in about one of six samples, and in none after a text."""

WEIGHTS = {"call_parsed": 0.2, "right_expression": 0.3, "answer_tag": 0.1, "right_answer": 0.4}
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
NUMBERS = range(10, 100)
TEST_SHARE = 10
"""One of so many pairs of numbers is held out."""


def build() -> Agent:
    """The agent to train; a run gives it the policy as its model."""
    return Agent(ROLE, system_prompt=SYSTEM_PROMPT, examples=EXAMPLE, tools=[TOOL], max_turns=3)


class CalculatorEnvironment:
    """Two-digit sums and differences. A pair of numbers is in one split only, in either order."""

    def tasks(self, split: Split, *, count: int, seed: int = 0) -> Sequence[Task]:
        """`count` questions in an order that `seed` gives; they repeat once all have been asked."""
        questions = [
            (left, operator, right)
            for left, right in itertools.product(NUMBERS, repeat=2)
            if _split(left, right) == split
            for operator in "+-"
        ]
        random.Random(seed).shuffle(questions)
        return [
            _task(*question) for question in itertools.islice(itertools.cycle(questions), count)
        ]

    async def score(self, task: Task, episode: Episode) -> Reward:
        """Judge what the agent called, and what it answered after the calculator had spoken."""
        trajectory = episode.trajectory(ROLE) or next(iter(episode.trajectories), None)
        return Reward(total=0.0) if trajectory is None else judge(task, trajectory)


def judge(task: Task, trajectory: Trajectory) -> Reward:
    """The reward of one trajectory."""
    calls = [call for turn in trajectory.turns for call in turn.completion.tool_calls]
    expressions = [_expression(call) for call in calls]
    valid = [expression for expression in expressions if expression is not None]
    answers = ANSWER.findall(_words_after_result(trajectory)) if valid else []
    passed = {
        "call_parsed": bool(valid),
        "right_expression": bool(valid) and _is_right(valid[-1], task),
        "answer_tag": bool(answers),
        "right_answer": bool(answers) and answers[-1].strip() == str(task.data["answer"]),
    }
    breakdown = {name: WEIGHTS[name] * ok for name, ok in passed.items()}
    return Reward(total=round(sum(breakdown.values()), 6), breakdown=breakdown)


def _split(left: int, right: int) -> Split:
    """Decided by a hash, so that no seed can move a question into the other split."""
    pair = f"{min(left, right)},{max(left, right)}".encode()
    return "test" if hashlib.sha256(pair).digest()[0] % TEST_SHARE == 0 else "train"


def _task(left: int, operator: str, right: int) -> Task:
    answer = left + right if operator == "+" else left - right
    return Task(
        id=f"calculator:{left}{operator}{right}",
        prompt=f"What is {left} {operator} {right}?",
        data={"left": left, "operator": operator, "right": right, "answer": answer},
    )


def _expression(call: ToolCall) -> str | None:
    expression = call.arguments.get("expression")
    valid = call.malformed is None and call.name == TOOL and isinstance(expression, str)
    return str(expression) if valid else None


def _is_right(expression: str, task: Task) -> bool:
    """It computes the truth, and not from numbers that the agent made up."""
    numbers = sorted(int(digits) for digits in re.findall(r"[0-9]{1,9}", expression))
    if numbers != sorted(int(str(task.data[side])) for side in ("left", "right")):
        return False
    try:
        return evaluate(expression) == task.data["answer"]
    except ToolError:
        return False


def _words_after_result(trajectory: Trajectory) -> str:
    """What the agent itself wrote from the turn on in which it saw a tool's result."""
    words: list[str] = []
    seen = False
    for turn in trajectory.turns:
        seen = seen or any(_is_result(message) for message in turn.new_messages)
        if seen:
            words.append(turn.completion.text)
    return "\n".join(words)


def _is_result(message: Message) -> bool:
    return message.role == "tool" and message not in EXAMPLE
