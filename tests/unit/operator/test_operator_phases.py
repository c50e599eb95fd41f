"""Test that the phase shows no restart on the way to the end, whatever happens meanwhile."""

from typing import Any, Final

import pytest

from fake_cluster.kubelets import termination_message
from fake_cluster.stories import condition_of, end_pods, fail, run_job
from fake_cluster.world import World
from stepkeeper.contract import ExitCode
from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus, Phase

OTHER_IMAGE: Final = {"spec": {"containers": [{"name": "trainer", "image": "trainer:2"}]}}


@pytest.mark.parametrize("restarts", [0, 1])
async def test_a_job_whose_pods_exit_0_is_running_until_it_is_complete(restarts: int) -> None:
    world, phases = await run_job(), set()
    for _ in range(restarts):
        fail(world)
        await world.run_until_settled()
    for pod in world.pods:
        world.controllers.end_pod(pod, 0)
        await world.reconcile()
        phases.add(world.phase())
        world.now += 2
    for _ in range(4):
        world.controllers.sync()
        await world.reconcile()
        phases.add(world.phase())
        world.now += 2
    assert world.phase() is Phase.COMPLETE
    assert phases == {Phase.RUNNING, Phase.COMPLETE}
    assert world.events[-1] == "Complete"


@pytest.mark.parametrize("edit", [{"template": OTHER_IMAGE}, {"suspend": True}, {}])
async def test_a_job_whose_pods_have_exited_0_is_complete_though_it_is_edited_or_loses_its_jobset(
    edit: dict[str, Any],
) -> None:
    world = await run_job()
    end_pods(world, 0)
    world.controllers.sync()
    if edit:
        world.edit(**edit)
    else:
        world.cluster.mark_deleted("jobsets", "default", "lm", grace_s=0)
    await world.run_until_settled()
    assert world.condition("Complete") == (ConditionStatus.TRUE, "AllPodsSucceeded")
    assert (world.phase(), world.causes) == (Phase.COMPLETE, [None])
    assert world.status.operator.job_sets == 1


async def test_a_pod_that_was_told_to_stop_and_replaced_keeps_no_job_from_its_end() -> None:
    world = await run_job()
    world.controllers.kubelets.stop_code = 0
    world.controllers.disrupt(world.pods[1], "EvictionByEvictionAPI")
    await world.run_until_settled(rounds=3)
    world.controllers.delete_job("lm-w-0")
    await world.run_until_settled(rounds=3)
    end_pods(world, 0)
    await world.run_until_settled(rounds=4)
    assert world.phase() is Phase.COMPLETE


def end_done(world: World, index: int, *, side_code: int) -> str:
    """End a pod whose trainer says that the training is done, and whose sidecar exited with that code."""
    pod = world.pods[index]
    world.controllers.end_pod(pod, 0, message=termination_message(ExitCode.DONE, step=1000))
    name = str(pod["metadata"]["name"])
    (trainer,) = world.cluster.objects["pods", "default", name]["status"]["containerStatuses"]
    side = {"name": "side", "state": {"terminated": {"exitCode": side_code, "reason": "Error"}}}
    phase = "Failed" if side_code else "Succeeded"
    world.cluster.put("pods", pod | {"status": {"phase": phase, "containerStatuses": [trainer, side]}})
    return name


@pytest.mark.parametrize("seen", ["at once", "after the restart", "one by one", "one long after the other"])
async def test_a_training_that_is_done_is_complete_though_a_sidecar_failed(seen: str) -> None:
    world = await run_job()
    failed = end_done(world, 0, side_code=7)
    if seen.startswith("one "):
        await world.reconcile()
        assert world.causes == ["ApplicationError"], "the other trainer may have failed"
    if seen == "one long after the other":
        world.delay_watches("pods")
    end_done(world, 1, side_code=0)
    if "after" in seen:
        world.controllers.sync()
        assert world.jobset is not None
        assert world.jobset["status"]["restarts"] == 1
    if seen == "one long after the other":
        world.now += 2
        await world.reconcile()
        assert world.status.restarts.total == 1
        world.deliver_watches()
    await world.run_until_settled()
    assert world.condition("Complete") == (ConditionStatus.TRUE, "TrainingDone")
    assert (world.phase(), world.status.restarts.total) == (Phase.COMPLETE, 0)
    assert [(attempt.cause, attempt.end is not None) for attempt in world.status.attempts] == [(None, True)]
    assert [pod for pod in world.pods if pod["status"]["phase"] == "Running"] == []
    (event,) = [event for event in world.cluster.list_objects("events") if event["reason"] == "Complete"]
    assert event["type"] == "Warning"
    assert f"container 'side' of pod {failed} exited with code 7" in event["note"]
    assert world.events.count("CauseCorrected") == seen.startswith("one ")
    assert world.events.count("StartWithdrawn") == (seen == "one long after the other")


async def test_a_sidecar_that_outlives_the_trainer_is_named() -> None:
    world = await run_job()
    ended = {"name": "trainer", "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}
    side = {"name": "logger", "state": {"running": {}}}
    for pod in world.pods:
        world.cluster.put("pods", pod | {"status": pod["status"] | {"containerStatuses": [ended, side]}})
    await world.run_until_settled(rounds=3)
    found = condition_of(world, "Running")
    assert (found.status, found.reason) == (ConditionStatus.FALSE, "TrainerEnded")
    assert "'logger'" in found.message
    assert "restartPolicy: Always" in found.message
    assert world.causes == [None]
