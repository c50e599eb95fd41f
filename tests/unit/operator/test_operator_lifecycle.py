"""Test starts, stops, edits and ends of a job, with the shipped reconcile and controllers that obey its manifests."""

from typing import Any

import pytest

from fake_cluster.kubelets import termination_message, training_report
from fake_cluster.stories import delete_pods, end_pods, play, run_job, stories, table
from fake_cluster.world import World
from stepkeeper.contract import ExitCode
from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus, Phase

ACCEPTED = (ConditionStatus.TRUE, "SpecAccepted")


async def test_a_job_at_rest_causes_no_write() -> None:
    await play(await run_job(), "rests, rests")


async def test_a_suspended_job_stops_and_resumes_as_a_new_attempt() -> None:
    world = await play(World(suspend=True), "run, phase Suspended, gone, resume, run, stop 0 0")
    world.controllers.kubelets.stop_message = termination_message(75, notice="sigterm", step=500)
    await play(
        world, "suspend, run, phase Suspended, pods 0, rests, resume, run, phase Running, causes Requested -"
    )


async def test_an_edited_template_gets_a_new_jobset_with_the_next_number() -> None:
    world = await play(await run_job(), "edit image new, run, phase Running, causes Requested -")
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


DELETED = {"kind": "CheckpointedTrainingJob", "name": "lm", "uid": "deleted", "controller": True}
JOBSET, CONFIG_MAP = ("jobsets", "lm"), ("configmaps", "lm-stepkeeper")


@table(
    "place, owners, found, wait_s",
    {
        "a ConfigMap of a deleted job": (CONFIG_MAP, [DELETED], ACCEPTED, 10),
        "a JobSet of a deleted job": (JOBSET, [DELETED], ACCEPTED, 10),
        "somebody's ConfigMap": (CONFIG_MAP, [], (ConditionStatus.FALSE, "ConfigMapNameTaken"), 60),
        "somebody's JobSet": (JOBSET, [], (ConditionStatus.FALSE, "JobSetNameTaken"), 60),
    },
)
async def test_what_has_the_name_already_is_left_alone_until_it_is_gone(
    place: tuple[str, str], owners: list[dict[str, Any]], found: tuple[ConditionStatus, str], wait_s: int
) -> None:
    world, (plural, name) = World(), place
    if not owners:
        world.delay_watches("jobsets")  # no watch shows JobSets without the operator's labels
    meta = {"name": name, "namespace": "default", "ownerReferences": owners}
    before = world.cluster.put(plural, {"metadata": meta, "data": {"a": "b"}, "spec": {"suspend": True}})
    await world.reconcile()
    await world.reconcile()
    assert world.condition("Accepted") == found
    left = world.message("Running").removeprefix("a deleted job of this name left ")
    assert not owners or left.split()[1] == f"{name}:"
    assert await world.record_writes(rounds=3) == []
    assert world.cluster.objects[plural, "default", name] == before
    world.cluster.remove(plural, "default", name)
    assert await wait_for_jobset(world) <= wait_s
    await play(world, "run 3, phase Running, condition Accepted True/SpecAccepted")


async def test_a_job_whose_pods_exited_0_after_a_notice_before_its_last_step_goes_on() -> None:
    world = await run_job()
    end_pods(world, 0, notice="sigterm", step=500)
    await play(world, "run, phase Running, causes Requested -")


@stories(
    {
        "a job that is being deleted is left alone": ("delete checkpointedtrainingjobs, fail, rests"),
        "a pod that was stopped and replaced keeps no job from its end": (
            "stop 0 0, disrupt 1 EvictionByEvictionAPI, run 3, delete-job, run 3, end 0, run 4, phase Complete"
        ),
        "commits and steps are shown though the clock has gone back": (
            "report 3 100, wait 20, look, wait -3600, report 200 200, look, wait 61, report 300 300, look, "
            "latest 300 300, step 300"
        ),
        "a job whose status was lost has the JobSet that runs": (
            "edit image new, run, lose-status, restart, run, phase Running, jobsets 2, report 3 30, wait 61, run, "
            "step 30, fail, run, causes ApplicationError -"
        ),
    },
)
async def test_of_a_job_that_runs(story: str) -> None:
    await play(await run_job(), story)


async def test_a_finished_job_is_deleted_after_its_time_to_live() -> None:
    world = await run_job(ttlSecondsAfterFinished=60)
    await play(world, "end 0, run 3, phase Complete, wait 60")
    assert "delete checkpointedtrainingjobs" in await world.record_writes()


SAVED = termination_message(75, notice="sigterm", step=1000)


@table(
    "step, word, evicted",
    {
        "nothing else is known": (None, "", False),
        "its last step was done when it was evicted": (1000, "", True),
        "it saved its last step, and a shell hides the code": (None, SAVED, False),
    },
)
async def test_a_job_is_complete_when_every_pod_exited_0(
    step: int | None, word: str, *, evicted: bool
) -> None:
    world = await run_job()
    if step is not None:
        world.receive_report(training_report(sequence=3, step=step))
        await world.reconcile()
    for pod in world.pods:
        if evicted:
            world.controllers.disrupt(pod, "EvictionByEvictionAPI")
        world.controllers.end_pod(pod, 0, message=word)
    world.now += 5
    delete_pods(world, 30)  # the deletion comes after their end
    await play(world, "run, phase Complete, attempts 1, rests")


@pytest.mark.parametrize("code", [1, 143, int(ExitCode.SAVED)])
@pytest.mark.parametrize("noticed", ["", "late jobsets, "])
async def test_a_suspension_costs_nothing_however_its_pods_end_and_whenever_jobset_says_so(
    code: int, noticed: str
) -> None:
    world = await run_job(restarts={"maxFailures": 0})
    await play(
        world, f"stop 0 {code}, suspend, look, {noticed}wait 2, act, look, deliver, run, phase Suspended"
    )
    await play(world, "resume, run, phase Running, causes Requested -")
    assert world.status.attempts[0].message == "suspended"


async def test_a_job_is_suspending_until_its_last_pod_has_ended_and_what_it_saves_meanwhile_is_shown() -> (
    None
):
    world = await play(await run_job(), "stop 20 75, suspend, run 5, phase Suspending")
    assert world.jobset is not None
    assert world.jobset["status"]["conditions"][0]["type"] == "Suspended"
    await play(world, "condition Suspended False/Suspending, message Suspended not ended yet: 2, causes -")
    await play(world, "report 9 90, look, latest 9 90, wait 20, run, phase Suspended, causes Requested")
    assert world.events.count("Suspending") == world.events.count("Suspended") == 1


@pytest.mark.parametrize("before", ["", "fail, run, "])
async def test_a_job_whose_pods_exit_0_is_running_until_it_is_complete(before: str) -> None:
    world, phases = await play(await run_job(), f"{before}look"), set()
    for pod in world.pods:
        world.controllers.end_pod(pod, 0)
        await world.reconcile()
        phases.add(world.phase())
        world.now += 2
    for _ in range(4):
        await play(world, "act, look, wait 2")
        phases.add(world.phase())
    assert world.phase() is Phase.COMPLETE
    assert phases == {Phase.RUNNING, Phase.COMPLETE}
    assert world.events[-1] == "Complete"


@pytest.mark.parametrize("change", ["edit image new", "suspend", "delete jobsets"])
async def test_a_job_whose_pods_have_exited_0_is_complete_whatever_is_changed(change: str) -> None:
    world = await play(await run_job(), f"end 0, act, {change}, run, phase Complete, jobsets 1, causes -")
    assert world.condition("Complete") == (ConditionStatus.TRUE, "AllPodsSucceeded")


def end_done(world: World, index: str, side_code: str) -> None:
    """End a pod whose trainer reports that the training is done, and whose sidecar exited with that code."""
    pod = world.pods[int(index)]
    world.controllers.end_pod(pod, 0, message=termination_message(ExitCode.DONE, step=1000))
    name = str(pod["metadata"]["name"])
    (trainer,) = world.cluster.objects["pods", "default", name]["status"]["containerStatuses"]
    side = {"name": "side", "state": {"terminated": {"exitCode": int(side_code), "reason": "Error"}}}
    phase = "Failed" if int(side_code) else "Succeeded"
    world.cluster.put("pods", pod | {"status": {"phase": phase, "containerStatuses": [trainer, side]}})


@table(
    "story, corrected, withdrawn",
    {
        "at once": ("done 0 7, done 1 0", 0, 0),
        "after the restart": ("done 0 7, done 1 0, act, restarts 1", 0, 0),
        "one by one": ("done 0 7, look, causes ApplicationError, done 1 0", 1, 0),
        "one long after the other": (
            "done 0 7, look, late pods, done 1 0, act, restarts 1, wait 2, look, costs ApplicationError=1/1, deliver",
            1,
            1,
        ),
    },
)
async def test_a_training_that_is_done_is_complete_though_a_sidecar_failed(
    story: str, corrected: int, withdrawn: int
) -> None:
    world = await run_job()
    failed = world.pods[0]["metadata"]["name"]
    await play(
        world, f"{story}, run, phase Complete, condition Complete True/TrainingDone, costs", done=end_done
    )
    assert [(attempt.cause, attempt.end is not None) for attempt in world.status.attempts] == [(None, True)]
    assert [pod for pod in world.pods if pod["status"]["phase"] == "Running"] == []
    (event,) = [event for event in world.cluster.list_objects("events") if event["reason"] == "Complete"]
    assert event["type"] == "Warning"
    assert f"container 'side' of pod {failed} exited with code 7" in event["note"]
    assert world.events.count("CauseCorrected") == corrected
    assert world.events.count("StartWithdrawn") == withdrawn


async def test_a_sidecar_that_outlives_the_trainer_is_named() -> None:
    world = await run_job()
    ended = {"name": "trainer", "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}
    side = {"name": "logger", "state": {"running": {}}}
    for pod in world.pods:
        world.cluster.put("pods", pod | {"status": pod["status"] | {"containerStatuses": [ended, side]}})
    await play(world, "run 3, condition Running False/TrainerEnded, message Running 'logger', causes -")
    assert "restartPolicy: Always" in world.message("Running")
