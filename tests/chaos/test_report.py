"""What a run found, as people read it."""

from aworld_runtime.chaos.checker import Violation
from aworld_runtime.chaos.report import Episodes, Report, text

WELL = Report(
    ok=True,
    seed=7,
    seconds=120,
    acked=245_310,
    faults={"worker_killed": 58},
    skipped={"server_disk_full": "only root can mount a small disk"},
    acked_lost=0,
    duplicate_commits=0,
    order_violations=0,
    silent_hangs=0,
    wrong_ends=0,
    queue_lost=0,
    not_archived=0,
    crashes=0,
    takeover_p99_s=2.314,
    takeovers_timed=212,
    load_per_core=1.2,
    failed_loudly=0,
    zombie_appends_refused=3,
    processes_left=0,
    episodes=Episodes(requested=610, finished=622, taken_over=230, misbehaved=12),
    store="sqlite",
    violations=(),
)


def row(report: Report, name: str) -> list[str]:
    return next(line for line in text(report).splitlines() if line.startswith(name)).split()


def test_each_figure_stands_beside_its_bound_and_each_fault_says_what_it_is() -> None:
    assert row(WELL, "acked_lost")[1:4] == ["0", "0", "yes"]
    assert row(WELL, "takeover_p99_s")[1:5] == ["2.31", "≤", "3", "yes"]
    assert row(WELL, "worker_killed")[1:4] == ["58", "kill", "-9"]
    assert row(WELL, "server_disk_full")[1:4] == ["skipped", "only", "root"]
    assert text(WELL).endswith("all holds")


def test_what_is_violated_is_named_and_told() -> None:
    lost = Violation("acked_lost", "episode:e1", 4, "w1 was told that id4 is there")
    slow = Violation("takeover_slow", "", 0, "99 of 100 takeovers within 3.40 s")
    bad = WELL.model_copy(
        update={"ok": False, "acked_lost": 2, "takeover_p99_s": 3.4, "violations": (lost, slow)}
    )

    assert row(bad, "acked_lost")[1:4] == ["2", "0", "no"]
    assert "acked_lost episode:e1@4: w1 was told that id4 is there" in text(bad)
    assert text(bad).endswith("violated: acked_lost, takeover_p99_s")


def test_where_nothing_was_taken_over_nothing_is_said_to_hold() -> None:
    assert row(WELL.model_copy(update={"takeover_p99_s": None}), "takeover_p99_s")[1] == "–"
