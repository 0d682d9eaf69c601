"""A checker that can't fail proves nothing: each kind of violation, made by hand, is found; and nothing else is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aworld_runtime.chaos.checker import (
    Evidence,
    Log,
    Stored,
    Violation,
    acked,
    check,
    gather,
    loud,
)
from aworld_runtime.chaos.history import Operation
from aworld_runtime.chaos.plan import Blow
from aworld_runtime.chaos.takeover import p99, takeovers

LOG = "episode:e1"
TYPES = ("episode.requested", "episode.claimed", "value.recorded", "episode.finished")


def stored(number: int, *, kind: str = "", body: int = 0, cause: str | None = None) -> Stored:
    kind = kind or TYPES[min(number, len(TYPES)) - 1]
    ending = {"reason": "answered", "says": "done"} if kind == "episode.finished" else {}
    return Stored(f"id{number}", body or number, kind, cause, **ending)


def events(*numbers: int) -> dict[int, Stored]:
    return {number: stored(number) for number in numbers}


def append(
    after: int, *numbers: int, outcome: str = "ok", at: float = 1.0, by: str = "w1"
) -> Operation:
    return Operation(
        process=by,
        call="append",
        target=LOG,
        began=at,
        ids=[f"id{number}" for number in numbers],
        bodies=list(numbers),
        types=[stored(number).type for number in numbers],
        episodes=["" for _ in numbers],
        after=after,
        ended=at + 0.1,
        outcome=outcome,  # pyright: ignore[reportArgumentType]
    )


def other(call: str, target: str, event_id: str, kind: str, at: float, by: str = "w1") -> Operation:
    return Operation(by, call, target, at, [event_id], [0], [kind], ["e1"], 0, at + 0.1, "ok")


def whole(**changes: Log) -> dict[str, Log]:
    return {LOG: Log(events(1, 2, 3, 4), events(1, 2, 3, 4)), **changes}


def kinds(evidence: Evidence) -> set[str]:
    return {violation.what for violation in check(evidence)}


OPERATIONS = [
    other("put", "episodes", "id1", "episode.requested", 0.5),
    other("take", "episodes", "id1", "episode.requested", 0.8),
    append(0, 1, 2),
    append(2, 3, outcome="unknown", at=2.0),
    append(2, 3, 4, at=3.0),
]


def test_a_run_in_which_all_is_well_has_no_violation() -> None:
    evidence = Evidence(OPERATIONS, whole(), answer=lambda _: "done")

    assert check(evidence) == []
    assert acked(OPERATIONS) == 4


def test_an_acknowledged_event_that_is_nowhere_is_lost() -> None:
    short = {LOG: Log(events(1, 2, 3), events(1, 2, 3))}

    assert "acked_lost" in kinds(Evidence(OPERATIONS, short))
    assert [v.seq for v in check(Evidence(OPERATIONS, short)) if v.what == "acked_lost"] == [4]


def test_an_acknowledged_event_at_another_seq_is_lost_there() -> None:
    moved = {LOG: Log(events(1, 2) | {3: stored(4), 4: stored(3)})}

    assert [v.seq for v in check(Evidence(OPERATIONS, moved)) if v.what == "acked_lost"] == [3, 4]


def test_an_unknown_append_may_be_there_or_not() -> None:
    unknown = [*OPERATIONS[:3], append(2, 3, outcome="unknown")]

    for there in (events(1, 2), events(1, 2, 3)):
        assert kinds(Evidence(unknown, {LOG: Log(there, there)})) == {"silent_hangs"}


def test_what_the_bus_let_go_counts_where_the_store_has_it() -> None:
    retired = {LOG: Log(events(4), events(1, 2, 3, 4))}

    assert check(Evidence(OPERATIONS, retired)) == []


def test_what_the_bus_lost_in_the_middle_is_lost_whatever_the_store_has() -> None:
    holed = {LOG: Log(events(1, 2, 4), events(1, 2, 3, 4))}

    assert {"acked_lost", "order_violations"} <= kinds(Evidence(OPERATIONS, holed))


def test_an_event_that_stands_twice_in_a_log_is_found() -> None:
    twice = {LOG: Log(events(1, 2, 3) | {4: stored(3), 5: stored(4)})}

    assert "duplicate_commits" in kinds(Evidence(OPERATIONS[:3], twice))


def test_two_ends_are_found() -> None:
    both = events(1, 2, 3, 4) | {5: replace(stored(4), id="id5")}

    assert {"duplicate_commits", "order_violations"} <= kinds(
        Evidence(OPERATIONS, {LOG: Log(both, both)})
    )


def test_two_acknowledgements_of_one_seq_are_found() -> None:
    zombie = replace(append(2, 3), ids=["id9"], bodies=[9], process="w2")

    found = [v for v in check(Evidence([*OPERATIONS, zombie], whole())) if v.seq == 3]

    assert {v.what for v in found} == {"acked_lost", "duplicate_commits"}


@pytest.mark.parametrize("there", [stored(3, body=99), replace(stored(3), id="id9")])
def test_a_store_that_holds_something_else_is_found(there: Stored) -> None:
    differs = {LOG: Log(events(1, 2, 3, 4), events(1, 2, 4) | {3: there})}

    assert "duplicate_commits" in kinds(Evidence(OPERATIONS, differs))


def test_a_body_that_is_not_as_it_was_sent_is_found() -> None:
    changed = events(1, 2, 4) | {3: stored(3, body=99)}

    assert kinds(Evidence(OPERATIONS, {LOG: Log(changed, changed)})) == {"duplicate_commits"}


def test_an_effect_before_its_cause_is_found() -> None:
    early = events(1, 3, 4) | {2: stored(2, cause="id3")}

    assert kinds(Evidence(OPERATIONS, {LOG: Log(early, early)})) == {"order_violations"}


def test_mail_that_overtook_the_same_senders_earlier_mail_is_found() -> None:
    mail = [other("mail", LOG, "id3", "value.recorded", 0.2), other("mail", LOG, "id2", "", 0.6)]

    assert kinds(Evidence([*OPERATIONS, *mail], whole())) == {"order_violations"}
    at_once = [mail[0], replace(mail[1], began=0.25)]
    assert check(Evidence([*OPERATIONS, *at_once], whole())) == []


def test_mail_that_was_in_the_log_before_it_was_sent_has_overtaken_none() -> None:
    late = [other("mail", LOG, "id3", "value.recorded", 0.2), other("mail", LOG, "id2", "", 1.05)]

    assert check(Evidence([*OPERATIONS, *late], whole())) == []


def test_an_episode_without_an_end_is_found() -> None:
    begun = {LOG: Log(events(1, 2), events(1, 2))}

    assert kinds(Evidence(OPERATIONS[:3], begun)) == {"silent_hangs"}
    assert kinds(Evidence(OPERATIONS[:2], {})) == {"silent_hangs"}


def test_a_healthy_episode_with_another_end_is_found() -> None:
    assert kinds(Evidence(OPERATIONS, whole(), answer=lambda _: "something else")) == {"wrong_ends"}


def test_work_that_nobody_got_is_lost_unless_the_server_came_back_empty() -> None:
    put = other("put", "lane", "x", "value.recorded", 5.0)
    emptied = Blow("server_emptied", "server", 6.0, 7.0)

    assert kinds(Evidence([*OPERATIONS, put], whole())) == {"queue_lost"}
    assert check(Evidence([*OPERATIONS, put], whole(), [emptied])) == []


def test_events_that_the_store_lacks_are_found() -> None:
    behind = {LOG: Log(events(1, 2, 3, 4), events(1, 2))}

    assert kinds(Evidence(OPERATIONS, behind)) == {"not_archived"}


def test_a_log_that_tells_of_its_loss_failed_loudly() -> None:
    restored = events(1, 2) | {3: Stored("r", 7, "log.restored"), 4: stored(4)}
    logs = {LOG: Log(restored, restored)}
    emptied = Blow("server_emptied", "server", 3.5, 3.6)

    assert loud(logs) == [LOG]
    assert check(Evidence(OPERATIONS, logs, [emptied])) == []


def test_what_only_the_store_has_of_a_log_that_tells_of_its_loss_failed_loudly_too() -> None:
    after = {4: replace(stored(3), id="x", cause=None), 5: replace(stored(4), id="y", cause=None)}
    restored = events(1, 2) | {3: Stored("r", 7, "log.restored")} | after
    logs = {LOG: Log(restored, events(1, 2, 3, 4))}
    emptied = Blow("server_emptied", "server", 3.5, 3.6)

    assert check(Evidence(OPERATIONS, logs, [emptied])) == []
    assert kinds(Evidence(OPERATIONS, logs)) == {"acked_lost", "duplicate_commits", "not_archived"}


def test_what_a_log_says_of_a_loss_excuses_none_that_came_after_it() -> None:
    restored = events(1, 2) | {3: Stored("r", 7, "log.restored"), 4: stored(4)}
    logs = {LOG: Log(restored, restored)}
    earlier = Blow("server_emptied", "server", 2.5, 2.6)

    found = [v.seq for v in check(Evidence(OPERATIONS, logs, [earlier])) if v.what == "acked_lost"]

    assert found == [3]


def test_a_loss_before_the_place_that_tells_of_it_is_none_of_its() -> None:
    restored = {1: replace(stored(1), id="x"), **events(2), 3: Stored("r", 7, "log.restored")}
    logs = {LOG: Log(restored | {4: stored(4)})}
    emptied = Blow("server_emptied", "server", 3.5, 3.6)

    found = [v.seq for v in check(Evidence(OPERATIONS, logs, [emptied])) if v.what == "acked_lost"]

    assert found == [1]


def test_violations_of_one_sort_in_one_log_are_told_once() -> None:
    many = [Violation("acked_lost", LOG, seq, "gone") for seq in range(1, 5)]

    (one,) = gather(many)

    assert (one.seq, one.detail) == (1, "gone (and 3 more, to seq 4)")


def test_a_takeover_is_timed_from_the_death_while_the_server_is_there() -> None:
    taken = replace(append(2, 3, at=12.0, by="w2"), types=["episode.taken_over"])
    operations = [*OPERATIONS[:3], taken]
    death = Blow("worker_killed", "w1", 10.0, 10.0)
    outage = Blow("server_stopped", "server", 5.0, 11.0)

    assert takeovers(Evidence(operations, whole(), [death])) == [pytest.approx(2.1)]
    assert takeovers(Evidence(operations, whole(), [death, outage])) == []
    assert p99([1.0, 2.0, 3.0]) == 3.0
    assert p99([]) is None


def test_an_heir_that_dies_before_its_first_word_begins_the_time_again() -> None:
    taken = replace(append(2, 3, at=14.0, by="w3"), types=["episode.taken_over"])
    operations = [
        *OPERATIONS[:3],
        other("take", "episodes", "id1", "episode.requested", 11.9, "w2"),
        other("take", "tools", "id9", "tool.called", 13.9, "t1"),
        taken,
    ]
    deaths = [
        Blow("worker_killed", name, at, at) for name, at in (("w1", 10), ("w2", 12), ("t1", 15))
    ]

    assert takeovers(Evidence(operations, whole(), deaths)) == [pytest.approx(2.1)]


def test_an_heir_that_dies_in_the_moment_of_its_claim_begins_the_time_again_too() -> None:
    taken = replace(append(2, 3, at=14.0, by="w3"), types=["episode.taken_over"])
    deaths = [
        Blow("worker_killed", "w1", 10.0, 10.0, held=("e1",)),
        Blow("worker_killed", "w2", 12.0, 12.0, held=("e1", "e2")),
        Blow("worker_killed", "w4", 13.0, 13.0, held=("e2",)),
    ]

    assert takeovers(Evidence([*OPERATIONS[:3], taken], whole(), deaths)) == [pytest.approx(2.1)]


def test_a_claim_that_the_server_lost_before_its_holder_died_begins_no_time_anew() -> None:
    """Seed 39: what followed was the outage's doing."""
    taken = replace(append(2, 3, at=19.0, by="w3"), types=["episode.taken_over"])
    claim = other("take", "episodes", "id1", "episode.requested", 11.9, "w2")
    blows = [
        Blow("worker_killed", "w1", 10.0, 10.0),
        Blow("server_emptied", "server", 12.0, 13.0),
        Blow("worker_killed", "w2", 15.0, 15.0),
    ]

    assert takeovers(Evidence([*OPERATIONS[:3], claim, taken], whole(), blows)) == []


def test_who_was_taken_over_before_it_died_is_no_owner_any_more() -> None:
    taken = [
        replace(append(after, after + 1, at=at, by=by), types=["episode.taken_over"])
        for after, at, by in ((2, 12.0, "w2"), (3, 15.0, "w3"))
    ]
    blows = [
        Blow("worker_stopped", "w1", 10, 20),
        Blow("worker_killed", "w2", 13, 13),
        Blow("worker_killed", "w1", 14.9, 14.9),
    ]

    assert takeovers(Evidence([*OPERATIONS[:3], *taken], whole(), blows)) == [
        pytest.approx(2.1),
        pytest.approx(2.1),
    ]
