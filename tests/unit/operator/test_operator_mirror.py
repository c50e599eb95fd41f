"""Test what the status shows of the storage when reports are missing, late, or of another root."""

from typing import Any

from fake_cluster.kubelets import termination_message, training_report
from fake_cluster.world import World
from stepkeeper.contract import CommitPoint, Head, Report, ReportPhase
from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus, Phase


async def running(**spec: Any) -> World:
    world = World(**spec)
    await world.run_until_settled(rounds=4)
    assert world.phase() is Phase.RUNNING
    return world


def fail(world: World, *, committed: int | None = None, root: str = "r") -> None:
    """End all trainers with code 1; their last words name a commit of theirs."""
    point = None if committed is None else CommitPoint(sequence=committed, step=10 * committed)
    for pod in world.pods:
        message = termination_message(1, root=root, committed=point, error="ValueError: x", step=999)
        world.controllers.end_pod(pod, 1, message=message)


def latest(world: World) -> tuple[int, int] | None:
    shown = world.status.checkpoint.latest if world.status.checkpoint is not None else None
    return None if shown is None else (shown.sequence, shown.step)


def failures(world: World) -> list[tuple[int, int]]:
    return [(entry.count, entry.counted_towards_limit) for entry in world.status.restarts.by_cause]


async def test_a_job_whose_reports_never_arrive_goes_on_as_long_as_its_last_words_name_new_commits() -> None:
    world = await running()
    for sequence in range(10, 70, 10):
        assert world.phase() is Phase.RUNNING
        fail(world, committed=sequence)
        await world.run_until_settled(rounds=30)
        assert latest(world) == (sequence, 10 * sequence)
    assert world.status.restarts.total == 6
    assert world.status.bookkeeping.starts_without_checkpoint == 1
    for _ in range(4):
        fail(world)
        await world.run_until_settled(rounds=30)
    assert world.condition("Failed") == (ConditionStatus.TRUE, "MaxFailuresReached")


async def test_a_commit_that_turned_out_to_be_bad_is_not_shown_again() -> None:
    world = await running(spot=True)
    world.receive_report(training_report(sequence=5, step=100))
    await world.reconcile()
    world.preempt()  # the last words name commit 7, step 120
    await world.run_until_settled()
    assert latest(world) == (7, 120)
    head = Head(sequence=5, step=100, uri="gs://b/5", size_bytes=1)
    restored = CommitPoint(sequence=5, step=100)
    report = Report(phase=ReportPhase.TRAINING, root="r", tail=9, head=head, step=101, restored=restored)
    world.receive_report(report)
    await world.run_until_settled(rounds=3)
    assert latest(world) == (5, 100)
    assert world.status.bookkeeping.starts_without_checkpoint == 1, "nothing was committed since"
    assert await world.record_writes(rounds=3) == []
    world.restart_operator()
    await world.run_until_settled(rounds=3)
    assert latest(world) == (5, 100)
    world.receive_report(training_report(sequence=11, step=130))
    await world.reconcile()
    assert latest(world) == (11, 130)
    assert world.status.bookkeeping.starts_without_checkpoint == 0


async def test_a_uri_that_is_edited_to_an_old_root_refills_no_budget_until_something_is_committed_there() -> (
    None
):
    world = await running(restarts={"maxFailures": 2})
    world.receive_report(training_report(sequence=7, step=120))
    await world.reconcile()
    world.controllers.end_pod(world.pods[0], 1)
    await world.run_until_settled()
    assert failures(world) == [(1, 1)]
    world.edit(checkpoint={"uri": "gs://bucket/runs/old", "interval": {"steps": 7}})
    await world.run_until_settled(rounds=2)
    old = Head(sequence=2, step=10, uri="gs://x/2", size_bytes=1)
    for step in (11, 12):
        report = Report(phase=ReportPhase.TRAINING, root="other", tail=3, head=old, step=step)
        world.receive_report(report)
        await world.run_until_settled(rounds=2)
        assert failures(world) == [(1, 1)]
        assert latest(world) == (2, 10)
    world.receive_report(training_report(sequence=5, step=20, root="other"))
    await world.run_until_settled(rounds=2)
    assert failures(world) == [(1, 0)]


async def test_last_words_of_another_root_count_only_while_nothing_newer_is_known() -> None:
    world = await running()
    world.receive_report(training_report(sequence=7, step=120))
    await world.reconcile()
    world.now += 5
    fail(world, committed=8)
    await world.run_until_settled()
    assert latest(world) == (8, 80)
    # The uri was edited before this start, and no report of it arrived.
    fail(world, committed=3, root="other")
    await world.run_until_settled()
    assert latest(world) == (3, 30)
    assert await world.record_writes(rounds=3) == []
    fail(world)
    await world.run_until_settled(rounds=30)
    assert failures(world) == [(3, 2)]
    world.receive_report(training_report(sequence=9, step=140, root="third"))
    await world.run_until_settled(rounds=3)
    assert latest(world) == (9, 140)
    assert await world.record_writes(rounds=3) == []
