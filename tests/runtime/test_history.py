"""History: folded from handler to handler, and the same as if it were folded for each."""

from aworld_runtime.bus.open import open_bus
from aworld_runtime.events import Event, RecordDropped
from aworld_runtime.nodes.history import History
from aworld_runtime.trajectory import TrajectoryFold
from tests.episodes import adding_program, request_episode, run_episode


async def log() -> list[Event]:
    program, _, _ = adding_program()
    async with open_bus("memory://") as bus:
        return await run_episode(bus, request_episode(), program)


def known(fold: TrajectoryFold) -> dict[str, object]:
    """All that a fold knows."""
    return vars(fold)


def folded(events: tuple[Event, ...], role: str) -> TrajectoryFold:
    fold = TrajectoryFold(role)
    for event in events:
        fold.add(event)
    return fold


async def test_a_trajectory_is_that_of_the_events_that_the_role_may_know() -> None:
    events = await log()
    history = History(events)
    for event in [
        *events,
        *reversed(events),
    ]:  # forwards as handlers do, and backwards as a debugger does
        for role in ("solver", "verifier"):
            expected = folded(history.until(event, role), role)
            assert known(history.trajectory(event, role)) == known(expected)
            assert known(History(events).trajectory(event, role)) == known(expected)


async def test_what_a_handler_took_back_is_not_known() -> None:
    events = await log()
    turn = next(e.seq for e in events if e.type == "model.completed")
    for cut in range(turn, len(events) + 1):
        told = events[cut - 1].caused(RecordDropped(seqs=(turn,)), source="solver/w2")
        grown = [e.at(seq) for seq, e in enumerate([*events[:cut], told, *events[cut:]], 1)]
        history = History(grown)
        for event in [*grown, *reversed(grown)]:
            expected = folded(history.until(event, "solver"), "solver")
            assert known(history.trajectory(event, "solver")) == known(expected)
        assert len(history.trajectory(grown[-1], "solver").turns) == 2


async def test_a_fold_that_was_given_out_stays_as_it_was() -> None:
    events = await log()
    history = History(events)
    first = history.trajectory(events[5], "solver")
    before = known(first.copy())
    history.trajectory(events[-1], "solver")
    assert known(first) == before


async def test_what_grows_and_what_was_forgotten_is_seen_again() -> None:
    events = await log()
    growing: list[Event] = []
    history = History(growing)
    for event in events:
        growing.append(event)
        turns = history.trajectory(event, "solver").turns
        history.forget()
        assert history.trajectory(event, "solver").turns == turns
    assert len(history.trajectory(events[-1], "solver").turns) == 3


async def test_of_later_events_a_role_knows_those_of_its_own_earlier_handlers() -> None:
    """The answers of calls that were made at once: each is handled on its own."""
    events = await log()
    first, second = [e for e in events if e.type == "tool.returned"][:2]
    own = [e.seq for e in History(events).until(first, "solver") if e.seq > first.seq]
    assert all(events[seq - 1].role == "solver" for seq in own)
    own = [e for e in History(events).until(second, "solver") if e.seq > second.seq]
    assert not [e for e in own if e.causation_id == second.id]
