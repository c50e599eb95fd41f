"""Test ends of attempts: their causes, their cost to the job, and the status."""

from typing import Any

from fake_cluster.kubelets import termination_message, training_report
from fake_cluster.world import World
from stepkeeper.contract import CommitPoint, ExitCode, Head, Report, ReportPhase
from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus, Phase


async def running(**spec: Any) -> World:
    world = World(**spec)
    await world.run_until_settled(rounds=4)
    assert world.phase() is Phase.RUNNING
    return world


async def test_a_spot_preemption_restarts_in_place_and_costs_no_failure() -> None:
    world = await running(spot=True)
    world.preempt()
    await world.run_until_settled()
    assert world.causes == ["SpotPreemption", None]
    assert world.jobset is not None
    assert world.jobset["status"] == world.jobset["status"] | {"restarts": 1, "restartsCountTowardsMax": 0}
    assert [(e.cause, e.count, e.counted_towards_limit) for e in world.status.restarts.by_cause] == [
        ("SpotPreemption", 1, 0)
    ]
    assert world.phase() is Phase.RUNNING
    assert "SpotPreemption" in world.events


async def test_the_last_words_of_a_preempted_trainer_show_its_commit_when_no_report_did() -> None:
    world = await running(spot=True)
    world.preempt()
    await world.run_until_settled()
    assert world.status.checkpoint is not None
    assert world.status.checkpoint.latest is not None
    assert (world.status.checkpoint.latest.sequence, world.status.checkpoint.latest.step) == (7, 120)


async def test_an_eviction_is_told_from_a_failure() -> None:
    world = await running()
    world.controllers.disrupt(world.pods[1], "EvictionByEvictionAPI")
    world.controllers.end_pod(world.pods[1], 143)
    await world.run_until_settled()
    assert world.causes == ["Eviction", None]


async def test_failures_restart_in_place_twice_then_in_a_new_jobset_after_a_back_off_then_end_the_job() -> (
    None
):
    world = await running()
    for _ in range(2):
        world.controllers.end_pod(world.pods[0], 1)
        await world.run_until_settled()
    assert world.status.bookkeeping.job_sets == 1
    world.controllers.end_pod(world.pods[0], 1)
    await world.run_until_settled(rounds=4)
    assert world.phase() is Phase.RESTARTING
    assert world.status.bookkeeping.not_before == (world.status.attempts[-1].end or 0) + 40
    await world.run_until_settled(rounds=25)
    assert world.status.bookkeeping.job_sets == 2
    assert world.phase() is Phase.RUNNING
    assert world.jobset is not None
    assert world.jobset["spec"]["failurePolicy"]["maxRestarts"] == 0
    world.controllers.end_pod(world.pods[0], 1)
    await world.run_until_settled()
    assert world.phase() is Phase.FAILED
    assert world.condition("Failed") == (ConditionStatus.TRUE, "MaxFailuresReached")
    assert world.status.restarts.total == 3
    assert await world.record_writes(rounds=3) == []


async def test_a_new_commit_refills_the_failure_budget() -> None:
    world = await running()
    for round_ in range(1, 9):
        world.receive_report(training_report(sequence=round_, step=100 * round_))
        await world.reconcile()
        world.controllers.end_pod(world.pods[0], 1)
        await world.run_until_settled(rounds=25)
        assert world.phase() is Phase.RUNNING
    assert world.status.restarts.total == 8


async def test_without_reset_on_new_checkpoint_commits_refill_nothing() -> None:
    world = await running(restarts={"maxFailures": 1, "resetOnNewCheckpoint": False})
    for round_ in range(1, 3):
        world.receive_report(training_report(sequence=round_, step=100 * round_))
        await world.reconcile()
        world.controllers.end_pod(world.pods[0], 1)
        await world.run_until_settled()
    assert world.phase() is Phase.FAILED


async def test_no_failure_is_allowed_where_max_failures_is_zero() -> None:
    world = await running(restarts={"maxFailures": 0})
    world.controllers.end_pod(
        world.pods[0], 1, message=termination_message(1, error="Traceback\nValueError: bad batch\n")
    )
    await world.run_until_settled()
    assert world.phase() is Phase.FAILED
    failed = next(c for c in world.status.conditions if c.type == "Failed")
    assert "ValueError: bad batch" in failed.message


async def test_a_fenced_trainer_ends_the_job_and_says_who_owns_the_root() -> None:
    world = await running()
    message = termination_message(ExitCode.FENCED, error="FencedError: the root is owned by default/other")
    world.controllers.end_pod(world.pods[0], ExitCode.FENCED, message=message)
    await world.run_until_settled()
    assert world.phase() is Phase.FAILED
    failed = next(c for c in world.status.conditions if c.type == "Failed")
    assert failed.reason == "RootOwnedByAnother"
    assert "default/other" in failed.message
    assert world.status.restarts.total == 0


async def test_a_fenced_trainer_behind_a_shell_ends_the_job_too() -> None:
    world = await running()
    world.controllers.end_pod(world.pods[0], 1, message=termination_message(ExitCode.FENCED))
    await world.run_until_settled()
    assert world.condition("Failed") == (ConditionStatus.TRUE, "RootOwnedByAnother")
    assert world.pods == []


async def test_a_fatal_exit_code_ends_the_job_at_once() -> None:
    world = await running(restarts={"fatalExitCodes": [42]})
    world.controllers.end_pod(world.pods[0], 42)
    await world.run_until_settled()
    assert world.condition("Failed") == (ConditionStatus.TRUE, "FatalExitCode")
    assert world.status.restarts.total == 0


async def test_disruptions_are_bounded_where_the_user_says_so() -> None:
    world = await running(spot=True, restarts={"maxDisruptions": 2})
    for _ in range(3):
        world.preempt()
        await world.run_until_settled()
    assert world.condition("Failed") == (ConditionStatus.TRUE, "MaxDisruptionsReached")
    assert world.pods == []
    assert world.jobset is None


async def test_a_lost_node_is_told_from_the_failure_of_its_survivors() -> None:
    world = await running()
    lost = world.pods[0]
    world.lose_node(lost["spec"]["nodeName"])
    world.controllers.end_pod(world.pods[1], 1)
    world.controllers.sync()
    await world.reconcile()
    assert world.causes == ["NodeFailure"]
    world.controllers.disrupt(lost, "DeletionByTaintManager")
    await world.run_until_settled(rounds=5)
    assert world.phase() is Phase.RESTARTING
    await world.run_until_settled(rounds=30)
    assert world.causes == ["NodeFailure", None]
    assert world.phase() is Phase.RUNNING


async def test_a_failure_is_found_to_be_a_lost_node_when_the_node_is_seen_to_be_lost() -> None:
    world = await running()
    lost = world.pods[0]
    world.controllers.stuck.add(lost["spec"]["nodeName"])
    world.controllers.end_pod(world.pods[1], 1)
    await world.run_until_settled(rounds=3)
    assert world.causes == ["ApplicationError"]
    world.lose_node(lost["spec"]["nodeName"])
    await world.run_until_settled(rounds=30)
    assert world.causes == ["NodeFailure", None]
    assert [(e.cause, e.count) for e in world.status.restarts.by_cause] == [("NodeFailure", 1)]
    assert "CauseCorrected" in world.events


async def test_a_preemption_that_no_operator_saw_is_judged_by_jobsets_counts() -> None:
    world = await running(
        placement={"tpu": {"accelerator": "v5p", "topology": "2x2x2", "slices": 1, "provisioning": "Spot"}}
    )
    world.stop_operator()
    world.preempt()
    world.controllers.sync()
    world.restart_operator()
    await world.run_until_settled()
    assert world.causes == ["SpotPreemption", None]
    assert world.phase() is Phase.RUNNING


async def test_a_failure_that_no_operator_saw_is_judged_by_jobsets_counts() -> None:
    world = await running()
    world.stop_operator()
    world.controllers.end_pod(world.pods[0], 1)
    world.controllers.sync()
    world.restart_operator()
    await world.run_until_settled()
    assert world.causes == ["ApplicationError", None]


async def test_a_failure_is_charged_once_though_the_watch_of_jobsets_is_behind() -> None:
    world = await running()
    world.delay_watches("jobsets")
    world.controllers.end_pod(world.pods[0], 1)
    await world.reconcile()
    world.controllers.sync()
    world.now += 60
    await world.reconcile()  # asks for the JobSet, which the job waits for
    assert world.causes == ["ApplicationError", None]
    world.now += 2
    await world.reconcile()  # believes the cache, which knows of no restart yet
    world.stop_operator()
    for _ in range(2):
        for pod in world.pods:
            world.controllers.end_pod(pod, ExitCode.SAVED)
        world.controllers.sync()
    world.restart_operator()
    await world.run_until_settled()
    assert len(world.causes) == 4
    assert world.causes.count("ApplicationError") == 1


async def test_a_restarted_operator_writes_nothing_for_a_job_at_rest() -> None:
    world = await running()
    world.restart_operator()
    assert await world.record_writes(rounds=3) == []


async def test_an_edit_of_the_checkpoint_settings_restarts_nothing() -> None:
    world = await running()
    world.edit(checkpoint={"uri": "gs://bucket/runs/lm", "interval": {"steps": 7}})
    await world.run_until_settled()
    assert world.causes == [None]
    settings = world.cluster.objects["configmaps", "default", "lm-stepkeeper"]["data"]["settings.json"]
    assert '"steps":7' in settings


async def test_a_lost_peer_alone_is_a_lost_node_if_the_attempt_had_committed() -> None:
    world = await running()
    world.receive_report(training_report(sequence=3, step=100))
    await world.reconcile()
    for pod in world.pods:
        world.controllers.end_pod(pod, ExitCode.PEER_LOST)
    await world.run_until_settled()
    assert world.causes == ["NodeFailure", None]


async def test_a_commit_is_written_at_once_and_progress_once_a_minute() -> None:
    world = await running()
    world.receive_report(training_report(sequence=3, step=100))
    assert "apply checkpointedtrainingjobs" in await world.record_writes()
    world.now += 10
    world.receive_report(training_report(sequence=3, step=150, commits=()))
    assert await world.record_writes() == []
    world.now += 10
    world.receive_report(training_report(sequence=5, step=200))
    assert "apply checkpointedtrainingjobs" in await world.record_writes()
    world.now += 61
    world.receive_report(training_report(sequence=5, step=260, commits=()))
    assert await world.record_writes() == ["apply checkpointedtrainingjobs"]
    assert world.status.progress is not None
    assert (world.status.progress.step, world.status.progress.percent) == (260, 26)


async def test_commits_are_written_once_a_second_at_most() -> None:
    world = await running()
    world.receive_report(training_report(sequence=3, step=100))
    await world.reconcile()
    world.receive_report(training_report(sequence=4, step=110))
    world.now += 0.2
    assert await world.record_writes() == []
    assert 0.5 < (await world.reconcile() or 0) < 1
    world.now += 1
    assert await world.record_writes() == ["apply checkpointedtrainingjobs"]


async def test_what_a_resumed_attempt_restored_is_shown_and_told() -> None:
    world = await running(spot=True)
    world.receive_report(training_report(sequence=3, step=100))
    await world.reconcile()
    world.preempt()
    await world.run_until_settled()
    world.receive_report(
        training_report(sequence=9, step=125, restored=CommitPoint(sequence=7, step=120), commits=())
    )
    await world.reconcile()
    assert world.status.checkpoint is not None
    assert world.status.checkpoint.restored is not None
    assert world.status.checkpoint.restored.sequence == 7
    assert world.status.attempts[-1].from_step == 120
    assert "Resumed" in world.events


async def test_what_an_attempt_restored_is_not_taken_for_the_next_ones() -> None:
    world = await running(spot=True)
    world.receive_report(
        training_report(sequence=3, step=100, restored=CommitPoint(sequence=2, step=90), in_flight_step=110)
    )
    await world.reconcile()
    before = world.status.checkpoint
    assert before is not None
    assert before.restored is not None
    world.preempt()
    await world.run_until_settled()
    assert world.status.attempts[-1].number == 2
    for _ in range(2):
        now = world.status.checkpoint
        assert now is not None
        assert (now.restored, now.in_flight_step) == (None, None)
        assert now.latest is not None
        # It has claimed the root, and restores.
        head = Head(sequence=7, step=120, uri="gs://b/7", size_bytes=1)
        world.receive_report(Report(phase=ReportPhase.RESTORING, root="r", tail=9, head=head))
        await world.reconcile()


async def test_silence_is_a_condition_and_never_a_restart() -> None:
    world = await running()
    world.receive_report(training_report(sequence=3, step=100))
    await world.reconcile()
    assert world.condition("Reporting") == (ConditionStatus.TRUE, "ReportsArrive")
    world.now += 600
    await world.run_until_settled(rounds=3)
    assert world.condition("Reporting") == (ConditionStatus.FALSE, "NoReports")
    assert world.causes == [None]
    assert await world.record_writes(rounds=3) == []


async def restarted_unseen() -> World:
    """End an attempt in a way that only JobSet has shown yet; the pods' termination messages arrive later."""
    world = await running()
    world.delay_watches("pods", "jobs")
    for pod in world.pods:
        world.controllers.disrupt(pod, "EvictionByEvictionAPI")
        world.controllers.end_pod(pod, 143)
    world.controllers.sync()
    await world.reconcile()
    return world


async def test_evidence_that_comes_after_the_restart_moves_its_cost_to_the_right_cause() -> None:
    world = await restarted_unseen()
    assert world.causes == ["Disruption", None]
    world.now += 100
    world.deliver_watches()
    await world.reconcile()
    assert world.causes == ["Eviction", None]
    assert [(entry.cause, entry.count) for entry in world.status.restarts.by_cause] == [("Eviction", 1)]
    assert world.status.restarts.total == 1


async def test_after_two_minutes_a_cause_is_settled() -> None:
    world = await restarted_unseen()
    world.now += 121
    world.deliver_watches()
    await world.reconcile()
    assert world.causes == ["Disruption", None]


async def test_a_job_that_changed_since_it_was_read_is_read_again_before_anything_is_done() -> None:
    world = World()
    stale = world.cluster.objects["checkpointedtrainingjobs", "default", "lm"]
    world.stop_operator()
    world.edit(suspend=True)
    again_s = await world.reconcile()
    assert again_s is not None
    assert world.jobset is None
    assert world.status.phase is None
    assert stale["metadata"]["generation"] == 1
    world.restart_operator()
    await world.run_until_settled()
    assert world.phase() is Phase.SUSPENDED
