"""Replay: the recorded handlers run again over the record, without a world to touch.

    delivery.handled ──▶ the delivered event, and what its handler recorded ──▶ Journal ──▶ node.handle ──▶ compare
    (log order)

`Rerun` runs one handler, `replay` all of them.
Nothing live can happen: a context without a world has no model, no tool and no clock. The first difference ends it.
Here too is `inspect`, which runs no user code at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import anyio

from aworld_runtime.errors import DivergenceError, ReplayError
from aworld_runtime.events import (
    DeliveryDeadLettered,
    DeliveryHandled,
    EpisodeRequested,
    Event,
)
from aworld_runtime.messages import Data
from aworld_runtime.nodes.context import Context
from aworld_runtime.nodes.journal import PATIENCE_S, Journal, journals
from aworld_runtime.nodes.node import Node, Program
from aworld_runtime.trajectory import Episode, episode_of

LONGEST_S = 600.0
"""That a handler which does not end may take, however long it took live."""


class Divergence(Data):
    """The first place where the code did something else than the record."""

    seq: int
    role: str
    message: str
    recorded: str
    replayed: str


class ReplayReport(Data):
    """What a replay found."""

    episode: str
    handlers: int
    """Handler invocations that ran again."""
    events: int
    """Events in the log."""
    live_calls: int = 0
    """Always 0: a replay has no world to call."""
    identical: bool
    divergence: Divergence | None = None


def inspect(events: Sequence[Event]) -> Episode:
    """The episode as its log tells it; runs no user code."""
    return episode_of(events)


class Rerun:
    """The recorded handlers of one episode, each of which runs again when it is asked to.

    Raises:
        ReplayError: the log doesn't begin with `episode.requested`.
    """

    def __init__(self, events: Sequence[Event], program: Program) -> None:
        if not events or not isinstance(events[0].data, EpisodeRequested):
            first = events[0].type if events else "nothing"
            raise ReplayError(f"the log begins with {first}; expected episode.requested")
        self._events = events
        self._nodes = program.by_role
        self._delivered = {event.seq: event for event in events}
        self._recorded = journals(events)
        self._requests = [(e.seq, e.data) for e in events if isinstance(e.data, EpisodeRequested)]

    @property
    def outcomes(self) -> Iterator[Event]:
        """How each handler ended, in the log's order; once each, also where a takeover ran it again."""
        seen: set[tuple[str, int]] = set()
        for event in self._events:
            data = event.data
            if isinstance(data, DeliveryHandled | DeliveryDeadLettered):
                if (event.role, data.seq) not in seen and data.seq in self._delivered:
                    yield event
                seen.add((event.role, data.seq))

    async def handler(self, outcome: Event) -> None:
        """Run the handler again that ended with `outcome`, a `delivery.handled` or `delivery.dead_lettered`.

        Raises:
            DivergenceError: it did something else than its record, or ended in another way.
        """
        if not isinstance(outcome.data, DeliveryHandled | DeliveryDeadLettered):
            raise TypeError(f"{outcome.type} (seq {outcome.seq}) ends no handler")
        delivered = self._delivered[outcome.data.seq]
        ctx = Context(
            role=outcome.role,
            source=outcome.source,
            event=delivered,
            log=self._events,
            request=self._request(outcome),
            world=None,
            journal=Journal(self._recorded.get((outcome.role, delivered.id), ())),
        )
        await _repeat(self._node(outcome), ctx, outcome)

    def _request(self, outcome: Event) -> EpisodeRequested:
        """The one in force when the handler ended: a fork has its own, after its parent's."""
        return next(data for seq, data in reversed(self._requests) if seq < outcome.seq)

    def _node(self, outcome: Event) -> Node:
        if outcome.role in self._nodes:
            return self._nodes[outcome.role]
        known = ", ".join(self._nodes) or "none"
        raise DivergenceError(
            f"at seq {outcome.seq}, {outcome.role} is recorded, but the program has no such role; it has: {known}",
            seq=outcome.seq,
            recorded=f"role {outcome.role}",
            replayed=f"roles {known}",
        )


async def replay(events: Sequence[Event], program: Program) -> ReplayReport:
    """Run every recorded handler of an episode again and compare, up to the first difference.

    Raises:
        ReplayError: the log doesn't begin with `episode.requested`.
    """
    rerun = Rerun(events, program)
    handlers = 0
    divergence: Divergence | None = None
    for outcome in rerun.outcomes:
        try:
            await rerun.handler(outcome)
        except DivergenceError as error:
            divergence = Divergence(
                seq=error.seq,
                role=outcome.role,
                message=str(error),
                recorded=error.recorded,
                replayed=error.replayed,
            )
            break
        handlers += 1
    return ReplayReport(
        episode=events[0].episode_id or "",
        handlers=handlers,
        events=len(events),
        identical=divergence is None,
        divergence=divergence,
    )


async def _repeat(node: Node, ctx: Context, outcome: Event) -> None:
    """Run one handler over its record.

    Raises:
        DivergenceError: it did something else, or ended in another way.
    """
    failure: BaseException | None = None
    took_s = (outcome.time - ctx.event.time).total_seconds()
    limit_s = (
        min(max(took_s, 0), LONGEST_S) + 2 * PATIENCE_S
    )  # its journal knows better what it waits for
    with anyio.move_on_after(limit_s) as limit:
        try:
            await node.handle(ctx, ctx.event)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the boundary: compared with how it ended then
            failure = error
    dead = outcome.data if isinstance(outcome.data, DeliveryDeadLettered) else None
    if dead is None or dead.error != "DivergenceError":
        ctx.journal.check()
    recorded = "handled" if dead is None else f"failed with {dead.error}: {dead.message}"
    if limit.cancelled_caught:
        replayed = "never ended"
    elif failure is not None:
        replayed = f"failed with {type(failure).__name__}: {failure}"
    else:
        replayed = "handled"
    same = (dead.error if dead else None) == (type(failure).__name__ if failure else None)
    if limit.cancelled_caught or not same:
        raise DivergenceError(
            f"at seq {outcome.seq}, {outcome.role} {recorded}; this time it {replayed}",
            seq=outcome.seq,
            recorded=recorded,
            replayed=replayed,
        )
