"""Test that a training that is done is complete, whatever its pods' other containers did."""

import pytest

from fake_cluster.kubelets import termination_message
from fake_cluster.world import World
from stepkeeper.contract import ExitCode
from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus, Phase


def end_done(world: World, index: int, *, side_code: int) -> str:
    """End a pod whose trainer says that the training is done, and whose sidecar exited with that code."""
    pod = world.pods[index]
    world.controllers.end_pod(pod, 0, message=termination_message(ExitCode.DONE, step=1000))
    name = pod["metadata"]["name"]
    (trainer,) = world.cluster.objects["pods", "default", name]["status"]["containerStatuses"]
    side = {"name": "side", "state": {"terminated": {"exitCode": side_code, "reason": "Error"}}}
    phase = "Failed" if side_code else "Succeeded"
    status = {"phase": phase, "containerStatuses": [trainer, side]}
    world.cluster.put("pods", pod | {"status": status})
    return str(name)


@pytest.mark.parametrize("seen", ["at once", "after the restart", "one by one", "one long after the other"])
async def test_a_training_that_is_done_is_complete_though_a_sidecar_failed(seen: str) -> None:
    world = World()
    await world.run_until_settled(rounds=3)
    assert world.phase() is Phase.RUNNING
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
    assert world.phase() is Phase.COMPLETE
    assert [(attempt.cause, attempt.end is not None) for attempt in world.status.attempts] == [(None, True)]
    assert world.status.restarts.total == 0
    assert [pod for pod in world.pods if pod["status"]["phase"] == "Running"] == []
    (event,) = [event for event in world.cluster.list_objects("events") if event["reason"] == "Complete"]
    assert event["type"] == "Warning"
    assert f"container 'side' of pod {failed} exited with code 7" in event["note"]
    assert world.events.count("CauseCorrected") == seen.startswith("one ")
    assert world.events.count("StartWithdrawn") == (seen == "one long after the other")
