"""Data sets that other trainers load, made from a run's episodes.

`sft.jsonl` holds conversations worth imitating, in OpenAI's messages format; `preferences.jsonl` a
better and a worse conversation about the same task. Pure functions; `write_jsonl` writes a file.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pydantic import JsonValue

from aworld_runtime.messages import Message, ToolCall, ToolSpec
from aworld_runtime.trajectory import Episode, Trajectory

Record = dict[str, JsonValue]


def sft_records(
    episodes: Iterable[Episode], *, roles: Sequence[str], min_reward: float
) -> Iterator[Record]:
    """One conversation per trajectory of `roles` whose reward is at least `min_reward`.

    Left out is what nobody should imitate: episodes that didn't end with an answer, and
    conversations with a malformed call.
    """
    for episode in episodes:
        for trajectory in _trajectories(episode, roles):
            if _reward(episode, trajectory) >= min_reward and _is_sound(episode, trajectory):
                yield {
                    "messages": [_message(message) for message in trajectory.messages],
                    "tools": [_tool(spec) for spec in trajectory.tools],
                    "label": "success",
                    **_metadata(episode, trajectory),
                }


def preference_records(
    episodes: Iterable[Episode], *, roles: Sequence[str], min_gap: float
) -> Iterator[Record]:
    """The best and the worst trajectory of each group and role, where `min_gap` lies between.

    Both begin with the same `prompt`: the messages before the first completion.
    """
    groups: dict[tuple[str, str], list[tuple[Episode, Trajectory]]] = defaultdict(list)
    for episode in episodes:
        for trajectory in _trajectories(episode, roles):
            if episode.group_id is not None:
                groups[episode.group_id, trajectory.role].append((episode, trajectory))
    for members in groups.values():
        ranked = sorted(members, key=lambda member: _reward(*member))
        worst, best = ranked[0], ranked[-1]
        gap = _reward(*best) - _reward(*worst)
        prompt = best[1].turns[0].new_messages
        same_prompt = prompt == worst[1].turns[0].new_messages
        if gap >= min_gap and gap > 0 and same_prompt and _is_sound(*best):
            yield {
                "prompt": [_message(message) for message in prompt],
                "chosen": [_message(message) for message in best[1].messages[len(prompt) :]],
                "rejected": [_message(message) for message in worst[1].messages[len(prompt) :]],
                "tools": [_tool(spec) for spec in best[1].tools],
                "chosen_reward": _reward(*best),
                "rejected_reward": _reward(*worst),
                "rejected_episode_id": worst[0].id,
                **_metadata(*best),
            }


def write_jsonl(path: Path, records: Iterable[Record], *, append: bool = False) -> int:
    """Write one record a line; returns how many."""
    count = 0
    with path.open("a" if append else "w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            count += 1
    return count


def _trajectories(episode: Episode, roles: Sequence[str]) -> list[Trajectory]:
    """Those that were scored."""
    found = [trajectory for role in roles if (trajectory := episode.trajectory(role)) is not None]
    return [t for t in found if t.turns and (t.reward is not None or episode.reward is not None)]


def _reward(episode: Episode, trajectory: Trajectory) -> float:
    reward = episode.reward if trajectory.reward is None else trajectory.reward
    return 0.0 if reward is None else reward


def _is_sound(episode: Episode, trajectory: Trajectory) -> bool:
    calls = (call for turn in trajectory.turns for call in turn.completion.tool_calls)
    return episode.reason == "answered" and all(call.malformed is None for call in calls)


def _metadata(episode: Episode, trajectory: Trajectory) -> Record:
    return {
        "reward": _reward(episode, trajectory),
        "reward_breakdown": dict(trajectory.breakdown),
        "role": trajectory.role,
        "task_id": episode.task.id,
        "episode_id": episode.id,
        "group_id": episode.group_id,
        "run_id": episode.run_id,
    }


def _message(message: Message) -> Record:
    record: Record = {"role": message.role, "content": message.content}
    if message.tool_calls:
        record["tool_calls"] = [_call(call) for call in message.tool_calls]
    if message.role == "tool":
        record["tool_call_id"] = message.tool_call_id
        record["name"] = message.name
    return record


def _call(call: ToolCall) -> Record:
    """Arguments as JSON text, as OpenAI has them; a malformed call as it was written."""
    arguments = call.malformed
    if arguments is None:
        arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def _tool(spec: ToolSpec) -> Record:
    return {"type": "function", "function": spec.model_dump(mode="json")}
