"""Test which commits may be deleted, as a function of the log and the policy."""

from collections.abc import Sequence

from stepkeeper.log import Claim, Log, ManifestRef
from stepkeeper.policy.keep import AnyOf, BestN, EveryNSteps, LastN, MaxAge
from stepkeeper.retention.deletable import choose_deletable

REF = ManifestRef(path="manifest.0.json", size_bytes=1, crc32c=1)


def commits(log: Log, claim: Claim, steps: Sequence[int]) -> list[int]:
    return [
        log.commit(claim, step=step, folder=f"{step}/f", size_bytes=1, manifest=REF).slot for step in steps
    ]


def steps_of(log: Log, slots: Sequence[int]) -> list[int]:
    return [log.state.commits[slot].step for slot in slots]


def test_the_newest_are_kept(log: Log) -> None:
    slots = commits(log, log.begin(), range(10, 60, 10))
    chosen = choose_deletable(log.state, LastN(2), verified=slots)
    assert steps_of(log, chosen) == [10, 20, 30]


def test_multiples_are_kept_besides(log: Log) -> None:
    slots = commits(log, log.begin(), range(10, 100, 10))
    chosen = choose_deletable(log.state, AnyOf((LastN(1), EveryNSteps(40))), verified=slots)
    assert steps_of(log, chosen) == [10, 20, 30, 50, 60, 70]


def test_the_newest_verified_one_is_kept_however_old(log: Log) -> None:
    slots = commits(log, log.begin(), range(10, 60, 10))
    chosen = choose_deletable(log.state, LastN(1), verified=slots[:2])
    assert steps_of(log, chosen) == [10, 30, 40]


def test_without_a_verified_one_nothing_goes(log: Log) -> None:
    claim = log.begin()
    slots = commits(log, claim, range(10, 60, 10))
    assert choose_deletable(log.state, LastN(1)) == ()
    log.mark_restored(claim, slots[3])
    assert steps_of(log, choose_deletable(log.state, LastN(1))) == [10, 20, 30]


def test_a_quarantined_commit_is_neither_kept_for_another_nor_deleted(log: Log) -> None:
    claim = log.begin()
    slots = commits(log, claim, (10, 20, 30))
    log.quarantine(claim, slots[2], "a bad block")
    assert steps_of(log, choose_deletable(log.state, LastN(1), verified=slots)) == [10]


def test_an_abandoned_branch_goes_once_the_line_has_passed_it_verified(log: Log) -> None:
    base, *_ = commits(log, log.begin(), (10, 20, 30))
    claim = log.begin(base=base)
    policy = LastN(5)
    assert choose_deletable(log.state, policy, verified=[base]) == ()
    (new,) = commits(log, claim, (25,))
    assert choose_deletable(log.state, policy, verified=[base]) == ()
    assert steps_of(log, choose_deletable(log.state, policy, verified=[base, new])) == [20]
    (newer,) = commits(log, claim, (30,))
    assert steps_of(log, choose_deletable(log.state, policy, verified=[base, newer])) == [20, 30]


def test_an_abandoned_commit_is_not_passed_by_one_from_before_it(log: Log) -> None:
    base, *_ = commits(log, log.begin(), (100, 20))
    claim = log.begin(base=base)
    (new,) = commits(log, claim, (10,))
    assert choose_deletable(log.state, LastN(5), verified=[base, new]) == ()
    (newer,) = commits(log, claim, (20,))
    assert steps_of(log, choose_deletable(log.state, LastN(5), verified=[base, new, newer])) == [20]


def test_a_root_without_a_head_loses_nothing(log: Log) -> None:
    slots = commits(log, log.begin(), (10, 20))
    log.begin(scratch=True)
    assert choose_deletable(log.state, LastN(1), verified=slots) == ()


def test_the_line_is_judged_in_the_order_of_commits_whatever_their_steps(log: Log) -> None:
    slots = commits(log, log.begin(), (30, 10, 20, 10))
    assert steps_of(log, choose_deletable(log.state, LastN(2), verified=slots)) == [30, 10]


def test_the_newest_stays_though_the_policy_does_not_ask_for_it(log: Log) -> None:
    slots = commits(log, log.begin(), (10, 20, 30))
    assert steps_of(log, choose_deletable(log.state, EveryNSteps(20), verified=slots[:1])) == []
    assert steps_of(log, choose_deletable(log.state, EveryNSteps(20), verified=slots)) == [10]


def test_metrics_are_read_from_the_commits(log: Log) -> None:
    claim = log.begin()
    for step, loss in ((10, "3.5"), (20, "0.5"), (30, "nan"), (40, "2.5"), (50, "none")):
        log.commit(claim, step=step, folder=f"{step}/f", size_bytes=1, manifest=REF, metrics={"loss": loss})
    verified = tuple(log.state.commits)
    assert steps_of(log, choose_deletable(log.state, BestN(1, "loss", "min"), verified)) == [10, 30, 40]
    assert steps_of(log, choose_deletable(log.state, BestN(2, "loss", "max"), verified)) == [20, 30]


def test_times_are_those_of_the_store(log: Log) -> None:
    slots = commits(log, log.begin(), (10, 20, 30))
    times = {slots[0]: 100.0, slots[1]: 200.0, slots[2]: 300.0}
    assert steps_of(log, choose_deletable(log.state, MaxAge(150), slots, times)) == [10]
    assert choose_deletable(log.state, MaxAge(150), slots) == (), "where the store doesn't say, none is old"
