"""What a run leaves for other trainers."""

import json
from pathlib import Path
from typing import Any

from aworld_runtime.events import StopReason
from aworld_runtime.messages import Completion, Message, Task, ToolCall, ToolSpec
from aworld_runtime.training.datasets import preference_records, sft_records, write_jsonl
from aworld_runtime.trajectory import Episode, Trajectory, Turn

CALL = ToolCall(id="c", name="calculator", arguments={"expression": "1 + 1"})
QUESTION = (Message(role="system", content="Be exact."), Message(role="user", content="1 + 1?"))


def episode(
    number: int,
    reward: float | None,
    *,
    group: str = "g1",
    call: ToolCall = CALL,
    reason: StopReason = "answered",
) -> Episode:
    result = Message(role="tool", content="2", name="calculator", tool_call_id="c")
    turns = (
        Turn(seq=3, new_messages=QUESTION, completion=Completion(tool_calls=(call,))),
        Turn(seq=6, new_messages=(result,), completion=Completion(text=f"answer {number}")),
    )
    trajectory = Trajectory(
        role="solver",
        turns=turns,
        tools=(ToolSpec(name="calculator"),),
        reward=reward,
        breakdown={"right_answer": reward or 0.0},
    )
    task = Task(id="t", prompt="1 + 1?", data={"answer": 2})
    return Episode(
        id=f"{group}.{number}",
        task=task,
        group_id=group,
        index=number,
        reason=reason,
        trajectories=(trajectory,),
    )


def sft(*episodes: Episode) -> list[Any]:
    return list(sft_records(episodes, roles=["solver"], min_reward=0.9))


def preferences(*episodes: Episode) -> list[Any]:
    return list(preference_records(episodes, roles=["solver"], min_gap=0.3))


def test_conversation_is_in_openai_format() -> None:
    (record,) = sft(episode(1, 1.0))
    assert record["messages"] == [
        {"role": "system", "content": "Be exact."},
        {"role": "user", "content": "1 + 1?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "c",
                    "type": "function",
                    "function": {"name": "calculator", "arguments": '{"expression": "1 + 1"}'},
                }
            ],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c", "name": "calculator"},
        {"role": "assistant", "content": "answer 1"},
    ]
    assert record["tools"][0]["function"]["name"] == "calculator"
    assert (record["label"], record["reward"]) == ("success", 1.0)
    assert record["episode_id"] == "g1.1"
    assert "answer" not in record  # what the environment knows stays there


def test_only_what_is_worth_imitating_is_kept() -> None:
    broken = ToolCall(id="c", name="", malformed="{oops")
    left_out = [
        episode(1, 0.5),
        episode(2, None),
        episode(3, 1.0, call=broken),
        episode(4, 1.0, reason="turn_limit"),
    ]
    assert sft(*left_out) == []
    assert list(sft_records([episode(1, 1.0)], roles=["verifier"], min_reward=0.9)) == []


def test_preferences_pair_best_and_worst_of_a_group() -> None:
    (pair,) = preferences(
        episode(1, 0.5), episode(2, 1.0), episode(3, 0.0), episode(4, 0.0, group="g2")
    )
    assert pair["prompt"] == [
        {"role": "system", "content": "Be exact."},
        {"role": "user", "content": "1 + 1?"},
    ]
    assert pair["chosen"][-1]["content"] == "answer 2"
    assert pair["rejected"][-1]["content"] == "answer 3"
    assert (pair["chosen_reward"], pair["rejected_reward"]) == (1.0, 0.0)


def test_no_pair_without_a_clear_difference() -> None:
    assert preferences(episode(1, 0.6), episode(2, 0.5)) == []
    assert preferences(episode(1, 1.0), episode(2, 1.0)) == []


def test_file_holds_one_record_a_line(tmp_path: Path) -> None:
    path = tmp_path / "sft.jsonl"
    records = sft_records([episode(1, 1.0), episode(2, 1.0)], roles=["solver"], min_reward=0.9)
    assert write_jsonl(path, records) == 2
    lines = path.read_text().splitlines()
    assert [json.loads(line)["episode_id"] for line in lines] == ["g1.1", "g1.2"]
