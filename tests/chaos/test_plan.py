"""The schedule is the seed's, and covers everything."""

from itertools import pairwise

import pytest

from aworld_runtime.chaos.plan import KILL_EVERY_S, KINDS, Fault, schedule


def test_a_seed_has_one_schedule() -> None:
    assert schedule(7, 120) == schedule(7, 120)
    assert schedule(7, 120) != schedule(8, 120)


def test_a_full_run_holds_every_kind() -> None:
    for seed in range(5):
        assert {fault.kind for fault in schedule(seed, 120)} == set(KINDS)


def test_short_runs_of_twenty_seeds_cover_every_kind() -> None:
    seen = {fault.kind for seed in range(20) for fault in schedule(seed, 15)}

    assert seen == set(KINDS)


@pytest.mark.parametrize("seconds", [6, 15, 120])
def test_faults_of_one_track_never_overlap_and_end_in_time(seconds: float) -> None:
    faults = schedule(3, seconds)

    for track in {kind.track for kind in KINDS.values()}:
        on_track = [fault for fault in faults if KINDS[fault.kind].track == track]
        assert all(one.until <= two.at for one, two in pairwise(on_track))
    assert all(fault.until <= seconds for fault in faults)


def test_workers_are_killed_every_two_seconds() -> None:
    kills = [fault.at for fault in schedule(1, 60) if fault.kind == "worker_killed"]

    assert len(kills) >= 25
    assert all(two - one == pytest.approx(KILL_EVERY_S) for one, two in pairwise(kills))


def test_left_out_kinds_change_nothing_on_other_tracks() -> None:
    kinds = [kind for kind in KINDS if kind != "server_emptied"]
    without = schedule(5, 60, kinds)

    def on_other_tracks(faults: list[Fault]) -> list[Fault]:
        return [fault for fault in faults if KINDS[fault.kind].track != "server"]

    assert on_other_tracks(schedule(5, 60)) == on_other_tracks(without)
    assert all(fault.kind != "server_emptied" for fault in without)
