"""What becomes of a job, over the shipped reconcile and a JobSet controller that obeys its manifests."""

from typing import Any

import pytest

from stepkeeper.contract import Commit, ExitCode, Head, Report, ReportPhase, Restored, Termination
from stepkeeper_operator.api.v1alpha1.trainingjob_status import ConditionStatus, Phase
from stepkeeper_operator.errors import InvalidObjectError
from stepkeeper_operator.testing import World


def last_word(code: int, **more: Any) -> str:
    return Termination(code=code, **more).to_json().decode()


def causes(world: World) -> list[str | None]:
    return [attempt.cause for attempt in world.status.attempts]


def phase(world: World) -> Phase | None:
    return world.status.phase


def condition(world: World, kind: str) -> tuple[ConditionStatus, str] | None:
    return next(((c.status, c.reason) for c in world.status.conditions if c.type == kind), None)


def preempt(world: World, index: int = 0) -> None:
    """The kubelet of a Spot machine ends the pod; its trainer saves on all hosts."""
    world.controllers.disrupt(world.pods[index], "TerminationByKubelet")
    for pod in world.pods:
        message = last_word(ExitCode.SAVED, notice="sigterm", step=120, root="r", sequence=7)
        world.controllers.end_pod(pod, ExitCode.SAVED, message=message)


def commit(sequence: int, step: int) -> Commit:
    uri = f"gs://bucket/runs/lm/{step}/1-abc"
    return Commit(sequence=sequence, step=step, uri=uri, size_bytes=10, duration_millis=5, time_unix_s=1)


def training(sequence: int, step: int, **more: Any) -> Report:
    head = Head(sequence=sequence, step=step, uri=f"gs://bucket/runs/lm/{step}/1-abc", size_bytes=10)
    base: dict[str, Any] = {
        "phase": ReportPhase.TRAINING,
        "root": "r",
        "tail": sequence,
        "head": head,
        "step": step,
        "commits": (commit(sequence, step),),
    }
    return Report(**(base | more))


async def running(**spec: Any) -> World:
    world = World(**spec)
    await world.settle(rounds=4)
    assert phase(world) is Phase.RUNNING
    return world


async def test_an_applied_job_gets_its_settings_and_a_jobset_and_runs() -> None:
    world = await running()
    assert [pod["metadata"]["labels"]["stepkeeper.dev/job-uid"] for pod in world.pods] == [
        world.job.metadata.uid
    ] * 2
    assert ("configmaps", "default", "lm-stepkeeper") in world.cluster.objects
    assert world.status.attempts[0].number == 1
    assert condition(world, "Accepted") == (ConditionStatus.TRUE, "SpecAccepted")
    assert condition(world, "Running") == (ConditionStatus.TRUE, "AllPodsRun")


async def test_a_job_at_rest_causes_no_write() -> None:
    world = await running()
    assert await world.writes_of(rounds=5) == []


async def test_a_spot_preemption_restarts_in_place_and_costs_no_failure() -> None:
    world = await running(spot=True)
    preempt(world)
    await world.settle()
    assert causes(world) == ["SpotPreemption", None]
    assert world.jobset is not None
    assert world.jobset["status"] == world.jobset["status"] | {"restarts": 1, "restartsCountTowardsMax": 0}
    assert [(e.cause, e.count, e.counted_towards_limit) for e in world.status.restarts.by_cause] == [
        ("SpotPreemption", 1, 1)
    ]
    assert phase(world) is Phase.RUNNING
    assert "SpotPreemption" in world.events


async def test_the_last_words_of_a_preempted_trainer_show_its_commit_when_no_report_did() -> None:
    world = await running(spot=True)
    preempt(world)
    await world.settle()
    assert world.status.checkpoint is not None
    assert world.status.checkpoint.latest is not None
    assert (world.status.checkpoint.latest.sequence, world.status.checkpoint.latest.step) == (7, 120)


async def test_an_eviction_is_told_from_a_failure() -> None:
    world = await running()
    world.controllers.disrupt(world.pods[1], "EvictionByEvictionAPI")
    world.controllers.end_pod(world.pods[1], 143)
    await world.settle()
    assert causes(world) == ["Eviction", None]


async def test_failures_restart_in_place_twice_then_in_a_new_jobset_after_a_back_off_then_end_the_job() -> (
    None
):
    world = await running()
    for _ in range(2):
        world.controllers.end_pod(world.pods[0], 1)
        await world.settle()
    assert world.status.bookkeeping.job_sets == 1
    world.controllers.end_pod(world.pods[0], 1)
    await world.settle(rounds=4)
    assert phase(world) is Phase.RESTARTING
    assert world.status.bookkeeping.not_before == (world.status.attempts[-1].end or 0) + 40
    await world.settle(rounds=25)
    assert world.status.bookkeeping.job_sets == 2
    assert phase(world) is Phase.RUNNING
    assert world.jobset is not None
    assert world.jobset["spec"]["failurePolicy"]["maxRestarts"] == 0
    world.controllers.end_pod(world.pods[0], 1)
    await world.settle()
    assert phase(world) is Phase.FAILED
    assert condition(world, "Failed") == (ConditionStatus.TRUE, "MaxFailuresReached")
    assert world.status.restarts.total == 3
    assert await world.writes_of(rounds=3) == []


async def test_a_new_commit_refills_the_failure_budget() -> None:
    world = await running()
    for round_ in range(1, 9):
        world.report(training(sequence=round_, step=100 * round_))
        await world.reconcile()
        world.controllers.end_pod(world.pods[0], 1)
        await world.settle(rounds=25)
        assert phase(world) is Phase.RUNNING
    assert world.status.restarts.total == 8


async def test_without_reset_on_new_checkpoint_commits_refill_nothing() -> None:
    world = await running(restarts={"maxFailures": 1, "resetOnNewCheckpoint": False})
    for round_ in range(1, 3):
        world.report(training(sequence=round_, step=100 * round_))
        await world.reconcile()
        world.controllers.end_pod(world.pods[0], 1)
        await world.settle()
    assert phase(world) is Phase.FAILED


async def test_no_failure_is_allowed_where_max_failures_is_zero() -> None:
    world = await running(restarts={"maxFailures": 0})
    world.controllers.end_pod(
        world.pods[0], 1, message=last_word(1, error="Traceback\nValueError: bad batch\n")
    )
    await world.settle()
    assert phase(world) is Phase.FAILED
    failed = next(c for c in world.status.conditions if c.type == "Failed")
    assert "ValueError: bad batch" in failed.message


async def test_a_fenced_trainer_ends_the_job_and_says_who_owns_the_root() -> None:
    world = await running()
    message = last_word(ExitCode.FENCED, error="FencedError: the root is owned by default/other")
    world.controllers.end_pod(world.pods[0], ExitCode.FENCED, message=message)
    await world.settle()
    assert phase(world) is Phase.FAILED
    failed = next(c for c in world.status.conditions if c.type == "Failed")
    assert failed.reason == "RootOwnedByAnother"
    assert "default/other" in failed.message
    assert world.status.restarts.total == 0


async def test_a_fenced_trainer_behind_a_shell_ends_the_job_too() -> None:
    world = await running()
    world.controllers.end_pod(world.pods[0], 1, message=last_word(ExitCode.FENCED))
    await world.settle()
    assert condition(world, "Failed") == (ConditionStatus.TRUE, "RootOwnedByAnother")
    assert world.pods == []


async def test_a_fatal_exit_code_ends_the_job_at_once() -> None:
    world = await running(restarts={"fatalExitCodes": [42]})
    world.controllers.end_pod(world.pods[0], 42)
    await world.settle()
    assert condition(world, "Failed") == (ConditionStatus.TRUE, "FatalExitCode")
    assert world.status.restarts.total == 0


async def test_disruptions_are_bounded_where_the_user_says_so() -> None:
    world = await running(spot=True, restarts={"maxDisruptions": 2})
    for _ in range(3):
        preempt(world)
        await world.settle()
    assert condition(world, "Failed") == (ConditionStatus.TRUE, "MaxDisruptionsReached")
    assert world.pods == []
    assert world.jobset is None


async def test_a_lost_node_is_told_from_the_failure_of_its_survivors() -> None:
    world = await running()
    lost = world.pods[0]
    world.lose_node(lost["spec"]["nodeName"])
    world.controllers.end_pod(world.pods[1], 1)
    world.controllers.sync()
    await world.reconcile()
    assert causes(world) == ["NodeFailure"]
    world.controllers.disrupt(lost, "DeletionByTaintManager")
    await world.settle(rounds=5)
    assert phase(world) is Phase.RESTARTING
    await world.settle(rounds=30)
    assert causes(world) == ["NodeFailure", None]
    assert phase(world) is Phase.RUNNING


async def test_a_failure_is_found_to_be_a_lost_node_when_the_node_is_seen_to_be_lost() -> None:
    world = await running()
    lost = world.pods[0]
    world.controllers.stuck.add(lost["spec"]["nodeName"])
    world.controllers.end_pod(world.pods[1], 1)
    await world.settle(rounds=3)
    assert causes(world) == ["ApplicationError"]
    world.lose_node(lost["spec"]["nodeName"])
    await world.settle(rounds=30)
    assert causes(world) == ["NodeFailure", None]
    assert [(e.cause, e.count) for e in world.status.restarts.by_cause] == [("NodeFailure", 1)]
    assert "CauseCorrected" in world.events


async def test_a_preemption_that_no_operator_saw_is_judged_by_jobsets_counts() -> None:
    world = await running(
        placement={"tpu": {"accelerator": "v5p", "topology": "2x2x2", "slices": 1, "provisioning": "Spot"}}
    )
    world.stop_operator()
    preempt(world)
    world.controllers.sync()
    world.restart_operator()
    await world.settle()
    assert causes(world) == ["SpotPreemption", None]
    assert phase(world) is Phase.RUNNING


async def test_a_failure_that_no_operator_saw_is_judged_by_jobsets_counts() -> None:
    world = await running()
    world.stop_operator()
    world.controllers.end_pod(world.pods[0], 1)
    world.controllers.sync()
    world.restart_operator()
    await world.settle()
    assert causes(world) == ["ApplicationError", None]


async def test_a_restarted_operator_writes_nothing_for_a_job_at_rest() -> None:
    world = await running()
    world.restart_operator()
    assert await world.writes_of(rounds=3) == []


async def test_a_suspended_job_stops_and_resumes_as_a_new_attempt() -> None:
    world = await running()
    world.edit(suspend=True)
    await world.settle()
    assert phase(world) is Phase.SUSPENDED
    assert world.pods == []
    assert await world.writes_of(rounds=3) == []
    world.edit(suspend=False)
    await world.settle()
    assert phase(world) is Phase.RUNNING
    assert causes(world) == ["Requested", None]


async def test_a_job_that_is_born_suspended_gets_no_jobset() -> None:
    world = World(suspend=True)
    await world.settle()
    assert phase(world) is Phase.SUSPENDED
    assert world.jobset is None


async def test_an_edited_template_gets_a_new_jobset_with_the_next_number() -> None:
    world = await running()
    world.edit(template={"spec": {"containers": [{"name": "trainer", "image": "trainer:2"}]}})
    await world.settle()
    assert causes(world) == ["Requested", None]
    assert phase(world) is Phase.RUNNING
    assert {pod["spec"]["containers"][0]["image"] for pod in world.pods} == {"trainer:2"}
    assert {pod["metadata"]["labels"]["stepkeeper.dev/jobset-number"] for pod in world.pods} == {"1"}


async def test_an_edit_of_the_checkpoint_settings_restarts_nothing() -> None:
    world = await running()
    world.edit(checkpoint={"uri": "gs://bucket/runs/lm", "interval": {"steps": 7}})
    await world.settle()
    assert causes(world) == [None]
    settings = world.cluster.objects["configmaps", "default", "lm-stepkeeper"]["data"]["settings.json"]
    assert '"steps":7' in settings


async def test_a_jobset_of_somebody_else_is_waited_for_and_never_adopted() -> None:
    world = World()
    world.cluster.put(
        "jobsets", {"metadata": {"name": "lm", "namespace": "default"}, "spec": {"suspend": True}}
    )
    await world.settle(rounds=3)
    assert condition(world, "Accepted") == (ConditionStatus.FALSE, "JobSetNameTaken")
    assert await world.writes_of(rounds=3) == []
    world.cluster.remove("jobsets", "default", "lm")
    world.cache.forget_jobset(next(iter(world.cache.training_jobs())))
    await world.settle()
    assert phase(world) is Phase.RUNNING


async def test_a_config_map_of_somebody_else_is_left_alone() -> None:
    world = World()
    foreign = {"metadata": {"name": "lm-stepkeeper", "namespace": "default"}, "data": {"mine": "x"}}
    world.cluster.put("configmaps", foreign)
    await world.settle(rounds=3)
    assert condition(world, "Accepted") == (ConditionStatus.FALSE, "ConfigMapNameTaken")
    assert world.cluster.objects["configmaps", "default", "lm-stepkeeper"]["data"] == {"mine": "x"}


async def test_a_jobset_that_somebody_deleted_is_made_again() -> None:
    world = await running()
    world.cluster.mark_deleted("jobsets", "default", "lm", grace_s=0)
    await world.settle()
    assert causes(world) == ["Requested", None]
    assert phase(world) is Phase.RUNNING
    assert world.status.bookkeeping.job_sets == 2


async def test_a_job_is_complete_when_every_pod_exited_0() -> None:
    world = await running()
    for pod in world.pods:
        world.controllers.end_pod(pod, 0)
    await world.settle()
    assert phase(world) is Phase.COMPLETE
    assert world.status.attempts[-1].cause is None
    assert await world.writes_of(rounds=3) == []


async def test_a_job_whose_pods_exited_0_after_a_notice_before_its_last_step_goes_on() -> None:
    world = await running()
    for pod in world.pods:
        world.controllers.end_pod(pod, 0, message=last_word(0, notice="sigterm", step=500))
    await world.settle()
    assert phase(world) is Phase.RUNNING
    assert causes(world) == ["Requested", None]


async def test_a_finished_job_is_deleted_after_its_time_to_live() -> None:
    world = await running(ttlSecondsAfterFinished=60)
    for pod in world.pods:
        world.controllers.end_pod(pod, 0)
    await world.settle(rounds=3)
    assert phase(world) is Phase.COMPLETE
    world.now += 60
    assert "delete checkpointedtrainingjobs" in await world.writes_of()


async def test_a_refused_jobset_is_a_condition_and_one_event() -> None:
    world = World()
    world.cluster.refusals["create", "jobsets"] = InvalidObjectError(422, "env is too long")
    for _ in range(4):
        with pytest.raises(InvalidObjectError):
            await world.reconcile()
        world.now += 2
    assert condition(world, "Accepted") == (ConditionStatus.FALSE, "Rejected")
    assert world.events.count("Rejected") == 1
    assert world.status.bookkeeping.job_sets == 1
    world.cluster.refusals.clear()
    await world.settle()
    assert condition(world, "Accepted") == (ConditionStatus.TRUE, "SpecAccepted")
    assert phase(world) is Phase.RUNNING


async def test_ten_restarts_without_evidence_or_commit_are_enough() -> None:
    world = await running()
    for _ in range(10):
        assert phase(world) is Phase.RUNNING
        world.controllers.end_pod(world.pods[0], ExitCode.SAVED)
        await world.settle()
    assert phase(world) is Phase.SUSPENDED
    assert condition(world, "Suspended") == (ConditionStatus.TRUE, "UnexplainedRestarts")
    assert world.pods == []


async def test_a_lost_peer_alone_is_a_lost_node_if_the_attempt_had_committed() -> None:
    world = await running()
    world.report(training(sequence=3, step=100))
    await world.reconcile()
    for pod in world.pods:
        world.controllers.end_pod(pod, ExitCode.PEER_LOST)
    await world.settle()
    assert causes(world) == ["NodeFailure", None]


async def test_a_commit_is_written_at_once_and_progress_once_a_minute() -> None:
    world = await running()
    world.report(training(sequence=3, step=100))
    assert "apply checkpointedtrainingjobs" in await world.writes_of()
    world.now += 10
    world.report(training(sequence=3, step=150, commits=()))
    assert await world.writes_of() == []
    world.now += 10
    world.report(training(sequence=5, step=200))
    assert "apply checkpointedtrainingjobs" in await world.writes_of()
    world.now += 61
    world.report(training(sequence=5, step=260, commits=()))
    assert await world.writes_of() == ["apply checkpointedtrainingjobs"]
    assert world.status.progress is not None
    assert (world.status.progress.step, world.status.progress.percent) == (260, 26)


async def test_commits_are_written_once_a_second_at_most() -> None:
    world = await running()
    world.report(training(sequence=3, step=100))
    await world.reconcile()
    world.report(training(sequence=4, step=110))
    world.now += 0.2
    assert await world.writes_of() == []
    assert 0.5 < (await world.reconcile() or 0) < 1
    world.now += 1
    assert await world.writes_of() == ["apply checkpointedtrainingjobs"]


async def test_what_a_resumed_attempt_restored_is_shown_and_told() -> None:
    world = await running(spot=True)
    world.report(training(sequence=3, step=100))
    await world.reconcile()
    preempt(world)
    await world.settle()
    world.report(training(sequence=9, step=125, restored=Restored(sequence=7, step=120), commits=()))
    await world.reconcile()
    assert world.status.checkpoint is not None
    assert world.status.checkpoint.restored is not None
    assert world.status.checkpoint.restored.sequence == 7
    assert world.status.attempts[-1].from_step == 120
    assert "Resumed" in world.events


async def test_silence_is_a_condition_and_never_a_restart() -> None:
    world = await running()
    world.report(training(sequence=3, step=100))
    await world.reconcile()
    assert condition(world, "Reporting") == (ConditionStatus.TRUE, "ReportsArrive")
    world.now += 600
    await world.settle(rounds=3)
    assert condition(world, "Reporting") == (ConditionStatus.FALSE, "NoReports")
    assert causes(world) == [None]
    assert await world.writes_of(rounds=3) == []


async def test_a_job_that_is_being_deleted_is_left_alone() -> None:
    world = await running()
    world.cluster.mark_deleted("checkpointedtrainingjobs", "default", "lm", grace_s=0)
    world.controllers.end_pod(world.pods[0], 1)
    assert await world.writes_of(rounds=3) == []
