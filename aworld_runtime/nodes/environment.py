"""The environment as a node: it scores what the swarm answered, and so ends the episode."""

from __future__ import annotations

from math import isfinite
from typing import cast

from pydantic import JsonValue

from aworld_runtime.environments.base import Environment, Reward
from aworld_runtime.errors import UnknownProgramError
from aworld_runtime.events import EpisodeAnswered, EpisodeFinished, Event, RewardGiven
from aworld_runtime.nodes.context import Context
from aworld_runtime.nodes.node import load, made
from aworld_runtime.trajectory import episode_of


class EnvironmentNode:
    """Handles `episode.answered`. Without an environment of the task's it only finishes the episode."""

    role = "environment"
    subscriptions = ("episode.answered",)

    async def handle(self, ctx: Context, event: Event) -> None:
        answered = event.data
        if not isinstance(answered, EpisodeAnswered):
            return
        reference = ctx.task.environment
        if reference is not None:

            async def score() -> JsonValue:
                environment = load_environment(reference)
                reward = cast("object", await environment.score(ctx.task, episode_of(ctx.history)))
                if not isinstance(reward, Reward):
                    raise TypeError(f"{reference}.score returned {reward!r}, not a Reward")
                return reward.model_dump(mode="json")

            reward = Reward.model_validate(await ctx.record("reward", score))
            if not isfinite(reward.total):
                raise ValueError(f"environment {reference!r} gave reward {reward.total}")
            ctx.emit(RewardGiven(reward=reward.total, breakdown=reward.breakdown))
        ctx.emit(EpisodeFinished(answer=answered.answer, reason=answered.reason))


def load_environment(reference: str) -> Environment:
    """The environment that `module:attribute` names; a class is called without arguments.

    Raises:
        UnknownProgramError: it can't be imported or made, or can't score.
    """
    found = load(reference)
    if isinstance(found, type):
        found = made(f"environment {reference!r}", cast("type[object]", found))
    if not hasattr(found, "score"):
        raise UnknownProgramError(
            f"{reference!r} is a {type(found).__name__}; expected an environment, with tasks() and score()"
        )
    return cast("Environment", found)
