"""Test starts, stops, edits and ends of a job, with the shipped reconcile and controllers that obey its manifests."""

import pytest

from fake_cluster.kubelets import saved_message, termination_message, training_report
from fake_cluster.world import World, running
from stepkeeper.contract import ExitCode
from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus, Phase

NEW_IMAGE = {"spec": {"containers": [{"name": "trainer", "image": "trainer:2"}]}}


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
    world = World(suspend=True)
    await world.run_until_settled()
    assert (world.phase(), world.jobset) == (Phase.SUSPENDED, None)
    world.edit(suspend=False)
    await world.run_until_settled()
    world.controllers.kubelets.stop_code = 0
    world.controllers.kubelets.stop_message = termination_message(75, notice="sigterm", step=500)
    world.edit(suspend=True)
    await world.run_until_settled()
    assert (world.phase(), world.pods) == (Phase.SUSPENDED, [])
    assert await world.record_writes(rounds=3) == []
    world.edit(suspend=False)
    await world.run_until_settled()
    assert world.phase() is Phase.RUNNING
    assert world.causes == ["Requested", None]


async def test_an_edited_template_gets_a_new_jobset_with_the_next_number() -> None:
    world = await running()
    world.edit(template=NEW_IMAGE)
    await world.run_until_settled()
    assert world.causes == ["Requested", None]
    assert world.phase() is Phase.RUNNING
    assert {pod["spec"]["containers"][0]["image"] for pod in world.pods} == {"trainer:2"}
    assert {pod["metadata"]["labels"]["stepkeeper.dev/jobset-number"] for pod in world.pods} == {"1"}


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
    owner = {"kind": "CheckpointedTrainingJob", "name": "lm", "uid": "deleted", "controller": True}
    meta = {"name": name, "namespace": "default", "ownerReferences": [owner]}
    before = world.cluster.put(plural, {"metadata": meta, "data": {}, "spec": {"suspend": False}})
    await world.reconcile()
    assert world.condition("Accepted") == (ConditionStatus.TRUE, "SpecAccepted")
    assert f"{name} of a deleted job of this name is still there" in world.message("Running")
    assert world.cluster.objects[plural, "default", name] == before
    assert await world.record_writes() == []
    world.cluster.remove(plural, "default", name)  # the garbage collector, a second later
    assert await wait_for_jobset(world) <= 10
    await world.run_until_settled(rounds=3)
    assert world.phase() is Phase.RUNNING


async def test_a_job_whose_pods_exited_0_after_a_notice_before_its_last_step_goes_on() -> None:
    world = await running()
    for pod in world.pods:
        world.controllers.end_pod(pod, 0, message=termination_message(0, notice="sigterm", step=500))
    await world.run_until_settled()
    assert world.phase() is Phase.RUNNING
    assert world.causes == ["Requested", None]


async def test_a_program_that_exits_0_when_it_is_evicted_is_started_again() -> None:
    world = await running()
    for pod in world.pods:
        world.controllers.disrupt(pod, "EvictionByEvictionAPI")
    world.now += 1
    for pod in world.pods:
        world.controllers.end_pod(pod, 0)
    await world.run_until_settled()
    assert (world.phase(), world.causes) == (Phase.RUNNING, ["Eviction", None])


async def test_pods_of_a_deleted_batch_job_end_an_attempt_and_those_that_take_their_place_begin_one() -> None:
    world = await running()
    world.controllers.delete_job("lm-w-0")
    await world.run_until_settled()
    assert (world.phase(), world.causes) == (Phase.RUNNING, ["Requested", None])
    assert world.status.operator.job_sets == 1


async def test_a_finished_job_is_deleted_after_its_time_to_live() -> None:
    world = await running(ttlSecondsAfterFinished=60)
    for pod in world.pods:
        world.controllers.end_pod(pod, 0)
    await world.run_until_settled(rounds=3)
    assert world.phase() is Phase.COMPLETE
    world.now += 60
    assert "delete checkpointedtrainingjobs" in await world.record_writes()


async def test_a_job_that_is_being_deleted_is_left_alone() -> None:
    world = await running()
    world.cluster.mark_deleted("checkpointedtrainingjobs", "default", "lm", grace_s=0)
    world.controllers.end_pod(world.pods[0], 1)
    assert await world.record_writes(rounds=3) == []


@pytest.mark.parametrize(
    ("plural", "name", "reason"),
    [("jobsets", "lm", "JobSetNameTaken"), ("configmaps", "lm-stepkeeper", "ConfigMapNameTaken")],
)
async def test_what_somebody_else_has_made_is_left_alone_until_it_is_gone(
    plural: str, name: str, reason: str
) -> None:
    world = World()
    world.delay_watches("jobsets")  # no watch tells of JobSets without the operator's labels
    meta = {"name": name, "namespace": "default"}
    theirs = world.cluster.put(plural, {"metadata": meta, "spec": {"suspend": True}, "data": {"mine": "x"}})
    await world.run_until_settled(rounds=3)
    assert world.condition("Accepted") == (ConditionStatus.FALSE, reason)
    assert await world.record_writes(rounds=3) == []
    now = world.cluster.objects[plural, "default", name]
    assert (now["spec"], now["data"]) == (theirs["spec"], theirs["data"])
    world.cluster.remove(plural, "default", name)
    assert await wait_for_jobset(world) <= 60
    assert world.condition("Accepted") == (ConditionStatus.TRUE, "SpecAccepted")


@pytest.mark.parametrize(
    ("step", "word", "is_evicted"),
    [
        pytest.param(None, "", False, id="nothing else is known"),
        pytest.param(1000, "", True, id="its last step was done when it was evicted"),
        pytest.param(
            None,
            termination_message(75, notice="sigterm", step=1000),
            False,
            id="it saved its last step, and a shell hides the code",
        ),
    ],
)
async def test_a_job_is_complete_when_every_pod_exited_0(
    step: int | None, word: str, *, is_evicted: bool
) -> None:
    world = await running()
    if step is not None:
        world.receive_report(training_report(sequence=3, step=step))
        await world.reconcile()
    for pod in world.pods:
        if is_evicted:
            world.controllers.disrupt(pod, "EvictionByEvictionAPI")
        world.controllers.end_pod(pod, 0, message=word)
    world.now += 5
    for pod in world.pods:  # pods that are deleted now were not told to stop before they ended
        world.cluster.mark_deleted("pods", "default", pod["metadata"]["name"], grace_s=30)
    await world.run_until_settled()
    assert world.phase() is Phase.COMPLETE
    assert len(world.causes) == 1
    assert await world.record_writes(rounds=3) == []


async def test_a_job_whose_status_was_lost_is_resumed_with_the_jobset_that_runs() -> None:
    world = await running()
    world.edit(template=NEW_IMAGE)
    await world.run_until_settled()
    raw = dict(world.cluster.objects["checkpointedtrainingjobs", "default", "lm"])
    del raw["status"]
    world.cluster.put("checkpointedtrainingjobs", raw)
    world.restart_operator()
    await world.run_until_settled()
    assert world.phase() is Phase.RUNNING
    assert world.status.operator.job_sets == 2
    world.receive_report(training_report(sequence=3, step=30))
    world.now += 61
    await world.run_until_settled()
    assert world.status.attempts[-1].to_step == 30
    world.controllers.end_pod(world.pods[0], 1)
    await world.run_until_settled()
    assert world.causes == ["ApplicationError", None]


@pytest.mark.parametrize("code", [1, 143, int(ExitCode.SAVED)])
@pytest.mark.parametrize("late", [False, True])
async def test_a_suspension_costs_nothing_however_its_pods_end_and_whenever_jobset_says_so(
    code: int, *, late: bool
) -> None:
    world = await running(restarts={"maxFailures": 0})
    world.controllers.kubelets.stop_code = code
    if code == ExitCode.SAVED:
        world.controllers.kubelets.stop_message = saved_message(sequence=4, step=44)
    world.edit(suspend=True)
    await world.reconcile()
    if late:
        world.delay_watches("jobsets")
    world.now += 2
    world.controllers.sync()
    await world.reconcile()
    world.deliver_watches()
    await world.run_until_settled()
    assert world.phase() is Phase.SUSPENDED
    world.edit(suspend=False)
    await world.run_until_settled()
    assert world.phase() is Phase.RUNNING
    assert world.causes == ["Requested", None]
    assert world.status.attempts[0].message == "suspended"


async def test_a_job_is_suspending_until_its_last_pod_has_ended_and_what_it_saves_meanwhile_is_shown() -> (
    None
):
    world = await running()
    world.controllers.kubelets.stop_s = 20
    world.controllers.kubelets.stop_code = int(ExitCode.SAVED)
    world.edit(suspend=True)
    await world.run_until_settled(rounds=5)
    assert world.jobset is not None
    assert world.jobset["status"]["conditions"][0]["type"] == "Suspended"
    assert world.phase() is Phase.SUSPENDING
    assert world.condition("Suspended") == (ConditionStatus.FALSE, "Suspending")
    assert "not ended yet: 2" in world.message("Suspended")
    assert world.causes == [None], "its pods run down"
    world.receive_report(training_report(sequence=9, step=90))
    await world.reconcile()
    assert world.latest == (9, 90)
    world.now += 20
    await world.run_until_settled()
    assert world.phase() is Phase.SUSPENDED
    assert world.causes == ["Requested"]
    assert world.events.count("Suspending") == world.events.count("Suspended") == 1


async def test_commits_and_steps_are_shown_though_the_clock_has_gone_back() -> None:
    world = await running()
    world.receive_report(training_report(sequence=3, step=100))
    world.now += 20
    await world.reconcile()
    world.now -= 3600
    for step in (200, 300):
        world.receive_report(training_report(sequence=step, step=step))
        await world.reconcile()
        world.now += 61
    assert world.latest == (300, 300)
    assert world.status.attempts[-1].to_step == 300
