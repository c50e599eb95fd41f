"""Test starts, stops, edits and ends of a job, with the shipped reconcile and controllers that obey its manifests."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fake_cluster.kubelets import termination_message, training_report
from fake_cluster.world import World
from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus, Phase
from stepkeeper_operator.cache.keys import job_key
from stepkeeper_operator.errors import InvalidObjectError


async def running(**spec: Any) -> World:
    world = World(**spec)
    await world.run_until_settled(rounds=4)
    assert world.phase() is Phase.RUNNING
    return world


async def test_an_applied_job_gets_its_settings_and_a_jobset_and_runs() -> None:
    world = await running()
    assert [pod["metadata"]["labels"]["stepkeeper.dev/job-uid"] for pod in world.pods] == [
        world.job.metadata.uid
    ] * 2
    assert ("configmaps", "default", "lm-stepkeeper") in world.cluster.objects
    assert world.status.attempts[0].number == 1
    assert world.condition("Accepted") == (ConditionStatus.TRUE, "SpecAccepted")
    assert world.condition("Running") == (ConditionStatus.TRUE, "AllPodsRun")


async def test_a_job_at_rest_causes_no_write() -> None:
    world = await running()
    assert await world.record_writes(rounds=5) == []


async def test_a_suspended_job_stops_and_resumes_as_a_new_attempt() -> None:
    world = await running()
    world.edit(suspend=True)
    await world.run_until_settled()
    assert world.phase() is Phase.SUSPENDED
    assert world.pods == []
    assert await world.record_writes(rounds=3) == []
    world.edit(suspend=False)
    await world.run_until_settled()
    assert world.phase() is Phase.RUNNING
    assert world.causes == ["Requested", None]


async def test_a_job_that_is_born_suspended_gets_no_jobset() -> None:
    world = World(suspend=True)
    await world.run_until_settled()
    assert world.phase() is Phase.SUSPENDED
    assert world.jobset is None


async def test_an_edited_template_gets_a_new_jobset_with_the_next_number() -> None:
    world = await running()
    world.edit(template={"spec": {"containers": [{"name": "trainer", "image": "trainer:2"}]}})
    await world.run_until_settled()
    assert world.causes == ["Requested", None]
    assert world.phase() is Phase.RUNNING
    assert {pod["spec"]["containers"][0]["image"] for pod in world.pods} == {"trainer:2"}
    assert {pod["metadata"]["labels"]["stepkeeper.dev/jobset-number"] for pod in world.pods} == {"1"}


@pytest.mark.parametrize("step", [None, 50])
async def test_an_edited_job_that_began_and_was_done_while_no_operator_looked_is_complete(
    step: int | None,
) -> None:
    world = await running()
    world.receive_report(replace(training_report(8, 0), step=step, commits=()))
    await world.run_until_settled(rounds=2)
    world.edit(template={"spec": {"containers": [{"name": "trainer", "image": "trainer:2"}]}})
    edited = world.jobset
    while (
        world.jobset is None or edited is None or world.jobset["metadata"]["uid"] == edited["metadata"]["uid"]
    ):
        world.controllers.sync()
        world.now += 5
        await world.reconcile()
    made = world.jobset["metadata"]["uid"]
    world.stop_operator()
    world.controllers.sync()
    for pod in world.pods:
        world.controllers.end_pod(pod, 0)
    world.controllers.sync()
    world.restart_operator()
    await world.run_until_settled()
    assert world.phase() is Phase.COMPLETE
    assert world.jobset is not None
    assert world.jobset["metadata"]["uid"] == made, "nothing that was done is done again"


async def test_a_jobset_of_somebody_else_is_waited_for_and_never_adopted() -> None:
    world = World()
    world.cluster.put(
        "jobsets", {"metadata": {"name": "lm", "namespace": "default"}, "spec": {"suspend": True}}
    )
    await world.run_until_settled(rounds=3)
    assert world.condition("Accepted") == (ConditionStatus.FALSE, "JobSetNameTaken")
    assert await world.record_writes(rounds=3) == []
    world.cluster.remove("jobsets", "default", "lm")
    world.cache.forget_jobset(job_key("default", "lm"))
    await world.run_until_settled()
    assert world.phase() is Phase.RUNNING


async def test_a_config_map_of_somebody_else_is_left_alone() -> None:
    world = World()
    foreign = {"metadata": {"name": "lm-stepkeeper", "namespace": "default"}, "data": {"mine": "x"}}
    world.cluster.put("configmaps", foreign)
    await world.run_until_settled(rounds=3)
    assert world.condition("Accepted") == (ConditionStatus.FALSE, "ConfigMapNameTaken")
    assert world.cluster.objects["configmaps", "default", "lm-stepkeeper"]["data"] == {"mine": "x"}
    world.cluster.remove("configmaps", "default", "lm-stepkeeper")
    assert await wait_for_jobset(world) <= 30


def of_a_deleted_job(name: str) -> dict[str, Any]:
    """Make the metadata of an object that a deleted job of the same name has left."""
    owner = {"kind": "CheckpointedTrainingJob", "name": "lm", "uid": "deleted", "controller": True}
    return {"name": name, "namespace": "default", "ownerReferences": [owner]}


async def wait_for_jobset(world: World) -> float:
    """Reconcile when the operator asks for it. Return after how many seconds the job has a JobSet of its own."""
    began = world.now
    while world.now - began < 3000:
        again_s = await world.reconcile()
        owners = [] if world.jobset is None else world.jobset["metadata"].get("ownerReferences", [])
        if any(owner["uid"] == world.job.metadata.uid for owner in owners):
            break
        world.now += again_s or 600
    return world.now - began


@pytest.mark.parametrize(("plural", "name"), [("configmaps", "lm-stepkeeper"), ("jobsets", "lm")])
async def test_a_job_that_is_deleted_and_applied_again_waits_only_until_what_was_left_is_gone(
    plural: str, name: str
) -> None:
    world = World()
    left: dict[str, Any] = {"metadata": of_a_deleted_job(name), "data": {"settings.json": "{}"}, "spec": {}}
    before = world.cluster.put(plural, left | {"spec": {"suspend": False}})
    await world.reconcile()
    assert world.condition("Accepted") == (ConditionStatus.TRUE, "SpecAccepted")
    waits = next(c.message for c in world.status.conditions if c.type == "Running")
    assert f"{name} of a deleted job of this name is still there" in waits
    assert world.cluster.objects[plural, "default", name] == before
    assert await world.record_writes() == []
    world.cluster.remove(plural, "default", name)  # the garbage collector, a second later
    assert await wait_for_jobset(world) <= 10
    await world.run_until_settled(rounds=3)
    assert world.phase() is Phase.RUNNING


async def test_a_jobset_that_somebody_deleted_is_made_again() -> None:
    world = await running()
    world.cluster.mark_deleted("jobsets", "default", "lm", grace_s=0)
    await world.run_until_settled()
    assert world.causes == ["Requested", None]
    assert world.phase() is Phase.RUNNING
    assert world.status.bookkeeping.job_sets == 2


async def test_a_job_is_complete_when_every_pod_exited_0() -> None:
    world = await running()
    for pod in world.pods:
        world.controllers.end_pod(pod, 0)
    await world.run_until_settled()
    assert world.phase() is Phase.COMPLETE
    assert world.status.attempts[-1].cause is None
    assert await world.record_writes(rounds=3) == []


async def test_a_job_whose_pods_exited_0_after_a_notice_before_its_last_step_goes_on() -> None:
    world = await running()
    for pod in world.pods:
        world.controllers.end_pod(pod, 0, message=termination_message(0, notice="sigterm", step=500))
    await world.run_until_settled()
    assert world.phase() is Phase.RUNNING
    assert world.causes == ["Requested", None]


@pytest.mark.parametrize(
    ("code", "cause"),
    [(1, "ApplicationError"), (42, "ApplicationError"), (75, "Requested"), (78, "ApplicationError")],
)
@pytest.mark.parametrize("ended_together", [True, False])
async def test_a_training_that_says_another_code_than_its_shell_is_not_done(
    code: int, cause: str, ended_together: bool
) -> None:
    world = await running()
    for pod in world.pods if ended_together else world.pods[:1]:
        world.controllers.end_pod(pod, 0, message=termination_message(code, step=500))
    for _ in range(8):
        await world.run_until_settled(rounds=4)
    assert world.causes == [cause, None]
    assert world.phase() is Phase.RUNNING
    assert world.status.bookkeeping.job_sets == 2


async def test_pods_beside_one_whose_shell_hides_its_failure_are_stopped_before_the_back_off() -> None:
    world = await running(restarts={"backoff": {"initialSeconds": 600, "maxSeconds": 600}})
    world.controllers.end_pod(world.pods[0], 0, message=termination_message(1, step=500))
    await world.run_until_settled()
    assert world.pods == [], "JobSet takes the one for done, and the other would wait for it all that time"
    assert world.phase() is Phase.RESTARTING
    world.now += 600
    await world.run_until_settled()
    assert world.phase() is Phase.RUNNING


@pytest.mark.parametrize(
    ("code", "reason"), [(77, "RootOwnedByAnother"), (42, "FatalExitCode"), (1, "MaxFailuresReached")]
)
@pytest.mark.parametrize("ended_together", [True, False])
async def test_a_final_end_that_a_shell_hides_is_final(code: int, reason: str, ended_together: bool) -> None:
    world = await running(restarts={"fatalExitCodes": [42], "maxFailures": 0})
    for pod in world.pods if ended_together else world.pods[:1]:
        world.controllers.end_pod(pod, 0, message=termination_message(code, error="Error: no"))
    await world.run_until_settled()
    if code == 1 and not ended_together:
        assert world.condition("Failed") is None, "the node of the other pod may be lost"
        world.now += 120
        await world.run_until_settled()
    assert world.condition("Failed") == (ConditionStatus.TRUE, reason)
    assert all(pod["status"]["phase"] == "Succeeded" for pod in world.pods)


async def test_a_training_that_saved_its_last_step_behind_a_shell_is_complete() -> None:
    world = await running()
    for pod in world.pods:
        world.controllers.end_pod(pod, 0, message=termination_message(75, notice="sigterm", step=1000))
    await world.run_until_settled()
    assert world.phase() is Phase.COMPLETE


async def test_a_suspended_job_whose_shells_exit_0_is_suspended_and_goes_on() -> None:
    world = await running()
    world.controllers.kubelets.stop_code = 0
    world.controllers.kubelets.stop_message = termination_message(75, notice="sigterm", step=500)
    world.edit(suspend=True)
    await world.run_until_settled()
    assert world.phase() is Phase.SUSPENDED
    world.edit(suspend=False)
    await world.run_until_settled()
    assert world.phase() is Phase.RUNNING
    assert world.causes == ["Requested", None]


async def test_a_finished_job_is_deleted_after_its_time_to_live() -> None:
    world = await running(ttlSecondsAfterFinished=60)
    for pod in world.pods:
        world.controllers.end_pod(pod, 0)
    await world.run_until_settled(rounds=3)
    assert world.phase() is Phase.COMPLETE
    world.now += 60
    assert "delete checkpointedtrainingjobs" in await world.record_writes()


async def test_a_refused_jobset_is_a_condition_and_one_event() -> None:
    world = World()
    world.cluster.refusals["create", "jobsets"] = InvalidObjectError(422, "env is too long")
    for _ in range(4):
        await world.reconcile()
        world.now += 2
    assert [write.verb for write in world.cluster.writes if write.plural == "jobsets"] == ["create"]
    assert world.condition("Accepted") == (ConditionStatus.FALSE, "Rejected")
    assert world.events.count("Rejected") == 1
    assert world.status.bookkeeping.job_sets == 1
    world.cluster.refusals.clear()
    world.now += 60
    await world.run_until_settled()
    assert world.condition("Accepted") == (ConditionStatus.TRUE, "SpecAccepted")
    assert world.phase() is Phase.RUNNING


async def test_a_job_that_is_being_deleted_is_left_alone() -> None:
    world = await running()
    world.cluster.mark_deleted("checkpointedtrainingjobs", "default", "lm", grace_s=0)
    world.controllers.end_pod(world.pods[0], 1)
    assert await world.record_writes(rounds=3) == []


STOPS: dict[str, Callable[[World, dict[str, Any]], None]] = {
    "Eviction": lambda world, pod: world.controllers.disrupt(pod, "EvictionByEvictionAPI"),
    "Requested": lambda world, pod: world.cluster.mark_deleted(
        "pods", "default", pod["metadata"]["name"], grace_s=30
    ),
}


@pytest.mark.parametrize("cause", STOPS)
@pytest.mark.parametrize("step", [None, 50])
async def test_a_program_that_exits_0_when_it_is_told_to_stop_is_started_again(
    cause: str, step: int | None
) -> None:
    world = await running()
    if step is not None:
        world.receive_report(training_report(sequence=3, step=step))
        await world.reconcile()
    for pod in world.pods:
        STOPS[cause](world, pod)
    world.now += 1
    for pod in world.pods:
        world.controllers.end_pod(pod, 0)
    await world.run_until_settled()
    assert world.causes == [cause, None]
    assert world.phase() is Phase.RUNNING
    message = world.status.attempts[0].message
    assert message is not None
    assert message.startswith("every pod exited 0 after it was told to stop")


async def test_a_program_that_was_done_when_it_was_told_to_stop_is_complete() -> None:
    world = await running()
    world.receive_report(training_report(sequence=3, step=1000))
    await world.reconcile()
    for pod in world.pods:
        world.controllers.disrupt(pod, "EvictionByEvictionAPI")
        world.controllers.end_pod(pod, 0)
    await world.run_until_settled()
    assert world.phase() is Phase.COMPLETE


async def test_pods_that_are_deleted_after_they_exited_0_were_not_told_to_stop() -> None:
    world = await running()
    for pod in world.pods:
        world.controllers.end_pod(pod, 0)
    world.now += 5
    for pod in world.pods:
        world.cluster.mark_deleted("pods", "default", pod["metadata"]["name"], grace_s=30)
    await world.run_until_settled()
    assert world.phase() is Phase.COMPLETE


async def test_a_jobset_that_came_and_went_between_two_looks_gives_its_number_to_no_other() -> None:
    world = World()
    await world.reconcile()
    assert numbers(world) == ["0"]
    world.controllers.sync()
    world.controllers.end_pod(world.pods[0], 1)
    world.controllers.sync()
    world.cluster.mark_deleted("jobsets", "default", "lm", grace_s=0)
    world.controllers.sync()
    assert world.jobset is None
    await world.run_until_settled()
    assert numbers(world) == ["1"]
    world.controllers.end_pod(world.pods[0], 1)
    await world.run_until_settled()
    assert world.phase() is Phase.RUNNING
    assert world.causes == ["ApplicationError", None]


def numbers(world: World) -> list[str]:
    return [
        raw["metadata"]["labels"]["stepkeeper.dev/jobset-number"]
        for raw in world.cluster.list_objects("jobsets")
    ]


@pytest.mark.parametrize("restarted", [True, False])
async def test_a_job_whose_status_was_lost_goes_on_with_the_jobset_that_runs(restarted: bool) -> None:
    world = await running()
    template = {"spec": {"containers": [{"name": "trainer", "image": "trainer:2"}]}}
    world.edit(template=template)
    await world.run_until_settled()
    assert numbers(world) == ["1"]
    raw = dict(world.cluster.objects["checkpointedtrainingjobs", "default", "lm"])
    del raw["status"]
    world.cluster.put("checkpointedtrainingjobs", raw)
    if restarted:
        world.restart_operator()
    await world.run_until_settled()
    assert world.phase() is Phase.RUNNING
    assert world.status.bookkeeping.job_sets == 2
    world.receive_report(training_report(sequence=3, step=30))
    world.now += 61
    await world.run_until_settled()
    assert world.status.attempts[-1].to_step == 30
    world.controllers.end_pod(world.pods[0], 1)
    await world.run_until_settled()
    assert world.causes == ["ApplicationError", None]
    assert world.phase() is Phase.RUNNING
