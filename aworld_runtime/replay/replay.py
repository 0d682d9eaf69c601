"""Replay: the recorded handlers run again over the record, without a world to touch.

    delivery.handled ──▶ the delivered event, and what its handler recorded ──▶ Journal ──▶ node.handle ──▶ compare
    (log order)

Nothing live can happen: a context without a world has no model, no tool and no clock. The first difference ends it.
Here too is `inspect`, which runs no user code at all. Forked logs are not replayed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from aworld_runtime.errors import DivergenceError, ReplayError
from aworld_runtime.events import (
    DeliveryDeadLettered,
    DeliveryHandled,
    EpisodeRequested,
    Event,
)
from aworld_runtime.messages import Data
from aworld_runtime.nodes.context import Context, Journal, journals
from aworld_runtime.nodes.node import Node, Program
from aworld_runtime.trajectory import Episode, episode_of


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


async def replay(events: Sequence[Event], program: Program) -> ReplayReport:
    """Run every recorded handler of an episode again and compare, up to the first difference.

    Raises:
        ReplayError: the log doesn't begin with `episode.requested`.
    """
    request = events[0].data if events else None
    if not isinstance(request, EpisodeRequested):
        raise ReplayError(
            f"the log begins with {events[0].type if events else 'nothing'}; expected episode.requested"
        )
    recorded = journals(events)
    nodes = {node.role: node for node in program.nodes}
    handlers = 0
    divergence: Divergence | None = None
    for outcome, delivered in _invocations(events):
        role = outcome.role
        try:
            ctx = Context(
                role=role,
                source=outcome.source,
                event=delivered,
                log=events,
                request=request,
                world=None,
                journal=Journal(recorded.get((role, delivered.id), ())),
            )
            await _repeat(_node(nodes, outcome), ctx, outcome)
        except DivergenceError as error:
            divergence = Divergence(
                seq=error.seq,
                role=role,
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


def _invocations(events: Sequence[Event]) -> Iterator[tuple[Event, Event]]:
    """How each handled delivery ended, and what was delivered; once each, also where a takeover handled it again."""
    delivered = {event.seq: event for event in events}
    seen: set[tuple[str, int]] = set()
    for event in events:
        data = event.data
        if isinstance(data, DeliveryHandled | DeliveryDeadLettered):
            if (event.role, data.seq) not in seen and data.seq in delivered:
                yield event, delivered[data.seq]
            seen.add((event.role, data.seq))


def _node(nodes: dict[str, Node], outcome: Event) -> Node:
    if outcome.role in nodes:
        return nodes[outcome.role]
    known = ", ".join(nodes) or "none"
    raise DivergenceError(
        f"at seq {outcome.seq}, {outcome.role} is recorded, but the program has no such role; it has: {known}",
        seq=outcome.seq,
        recorded=f"role {outcome.role}",
        replayed=f"roles {known}",
    )


async def _repeat(node: Node, ctx: Context, outcome: Event) -> None:
    """Run one handler over its record.

    Raises:
        DivergenceError: it did something else, or ended in another way.
    """
    failure: BaseException | None = None
    try:
        await node.handle(ctx, ctx.event)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the boundary: compared with how it ended then
        failure = error
    dead = outcome.data if isinstance(outcome.data, DeliveryDeadLettered) else None
    if dead is not None and ctx.journal.unanswered:
        return  # what it asked for failed then too: that is why the record ends here
    if dead is None or dead.error != "DivergenceError":
        ctx.journal.check()
    recorded = "handled" if dead is None else f"failed with {dead.error}: {dead.message}"
    replayed = "handled" if failure is None else f"failed with {type(failure).__name__}: {failure}"
    if (dead.error if dead else None) != (type(failure).__name__ if failure else None):
        raise DivergenceError(
            f"at seq {outcome.seq}, {outcome.role} {recorded}; this time it {replayed}",
            seq=outcome.seq,
            recorded=recorded,
            replayed=replayed,
        )
