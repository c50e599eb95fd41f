"""Test that jobs which this operator can't accept, or can't even read, are still managed."""

from typing import Any

import pytest

from fake_cluster.kubelets import training_report
from fake_cluster.world import World, running, training_job
from stepkeeper_operator.api.reading import read_object
from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus, Phase
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.errors import InvalidObjectError

REFUSAL = {"ttlSecondsAfterFinished": "soon"}
AT = {"uri": "gs://bucket/lm"}
TWO = {"every": {"steps": 5}, "continuous": {}}
REFUSED = (ConditionStatus.FALSE, "UnreadableSpec")


async def test_a_refused_job_is_suspended_and_not_resumed_before_it_is_accepted() -> None:
    world = await running()
    world.edit(**REFUSAL, suspend=True)
    await world.run_until_settled()
    assert world.phase() is Phase.SUSPENDED
    assert world.pods == []
    world.edit(suspend=False)
    await world.run_until_settled()
    assert world.jobset is not None
    assert world.jobset["spec"]["suspend"] is True
    world.edit(ttlSecondsAfterFinished=60)
    await world.run_until_settled()
    assert world.phase() is Phase.RUNNING


async def test_a_refused_edit_of_the_template_ends_nothing_and_starts_nothing() -> None:
    world = await running()
    world.edit(template={"spec": {"containers": [{"name": "other", "image": "x"}]}})
    await world.run_until_settled()
    assert world.condition("Accepted") == (ConditionStatus.FALSE, "NoTrainer")
    assert world.phase() is Phase.RUNNING
    world.cluster.mark_deleted("jobsets", "default", "lm", grace_s=0)
    await world.run_until_settled()
    assert world.jobset is None
    assert "not accepted" in world.message("Running")


async def test_fields_of_a_newer_crd_hold_up_nothing_and_are_reported() -> None:
    """After a rollback every job may have them, since the API server adds defaults and Helm rolls no CRDs back."""
    world = await running()
    pods = [pod["metadata"]["uid"] for pod in world.pods]
    placement = {"hosts": {"count": 2, "futureShape": "ring"}, "futureZone": "a"}
    world.edit(placement=placement, futureLimit=5)
    await world.run_until_settled()
    assert world.condition("Accepted") == (ConditionStatus.TRUE, "UnknownFields")
    named = "spec.futureLimit, spec.placement.futureZone, spec.placement.hosts.futureShape"
    assert f"this operator doesn't know {named}" in world.message("Accepted")
    assert world.events.count("UnknownFields") == 1
    assert [pod["metadata"]["uid"] for pod in world.pods] == pods, "nothing was started anew"
    world.controllers.end_pod(world.pods[0], 1)
    await world.run_until_settled(rounds=20)
    assert world.phase() is Phase.RUNNING
    assert world.status.restarts.total == 1
    world.edit(suspend=True)
    await world.run_until_settled()
    assert world.phase() is Phase.SUSPENDED
    assert world.events.count("UnknownFields") == 1


def spoil(world: World, **spec: Any) -> dict[str, Any]:
    """Write a spec that can't be read, as clients can that validate nothing. Return the object before it."""
    raw = world.cluster.objects["checkpointedtrainingjobs", "default", "lm"]
    world.cluster.put("checkpointedtrainingjobs", raw | {"spec": raw["spec"] | spec})
    return raw


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"ttlSecondsAfterFinished": "x"}, "spec.ttlSecondsAfterFinished: Input should be a valid integer"),
        ({"restarts": {"maxFailures": [], "fatalExitCodes": [1, "a"]}}, "spec.restarts.fatalExitCodes[1]"),
    ],
)
async def test_an_unreadable_part_of_the_spec_is_named_and_the_job_is_suspended_all_the_same(
    spec: dict[str, Any], said: str
) -> None:
    world = await running()
    spoil(world, **spec, suspend=True)
    await world.run_until_settled()
    assert world.condition("Accepted") == REFUSED
    assert said in world.message("Accepted")
    assert world.phase() is Phase.SUSPENDED
    assert len(world.causes) == 1
    assert world.pods == []
    assert world.events.count("UnreadableSpec") == 1
    assert await world.record_writes(rounds=3) == []


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"placement": "here"}, "spec.placement: is no object. Correct it"),
        ({"checkpoint": AT | {"interval": {"minutes": 5}}}, "doesn't know minutes. Correct it"),
        ({"checkpoint": AT | {"interval": TWO}}, "interval: only one of every, continuous. Correct it"),
    ],
)
async def test_a_job_that_can_not_be_read_at_all_is_told_so_and_suspended(
    spec: dict[str, Any], said: str
) -> None:
    world = await running()
    spoil(world, **spec, suspend=True)
    await world.run_until_settled()
    assert world.condition("Accepted") == REFUSED
    assert said in world.message("Accepted")
    for kind in ("Running", "Reporting", "Progressing"):
        assert world.condition(kind) == (ConditionStatus.UNKNOWN, "UnreadableSpec")
    assert len(world.causes) == 1
    assert world.jobset is not None
    assert world.jobset["spec"]["suspend"] is True
    assert world.pods == []
    assert world.events.count("UnreadableSpec") == 1
    assert await world.record_writes(rounds=3) == []


@pytest.mark.parametrize("ended", [False, True])
async def test_a_corrected_job_shows_nothing_of_the_spec_that_could_not_be_read(*, ended: bool) -> None:
    world = await running()
    if ended:
        for pod in world.pods:
            world.controllers.end_pod(pod, 0)
        await world.run_until_settled()
    good = spoil(world, checkpoint=5)["spec"]
    world.restart_operator()
    await world.run_until_settled(rounds=3)
    assert world.condition("Accepted") == REFUSED
    spoil(world, checkpoint=good["checkpoint"])
    await world.run_until_settled(rounds=3)
    assert world.phase() is (Phase.COMPLETE if ended else Phase.RUNNING)
    assert [c.type for c in world.status.conditions if c.reason == "UnreadableSpec"] == []


async def test_a_job_whose_private_status_is_lost_runs_on() -> None:
    world = await running()
    world.controllers.end_pod(world.pods[0], 1)
    await world.run_until_settled()
    pods = [pod["metadata"]["uid"] for pod in world.pods]
    raw = world.cluster.objects["checkpointedtrainingjobs", "default", "lm"]
    world.cluster.put("checkpointedtrainingjobs", raw | {"status": raw["status"] | {"operator": {}}})
    world.restart_operator()
    await world.run_until_settled()
    assert world.phase() is Phase.RUNNING
    assert [pod["metadata"]["uid"] for pod in world.pods] == pods


@pytest.mark.parametrize("spec", [{"ttlSecondsAfterFinished": "x"}, {"placement": "here"}, {"checkpoint": 5}])
async def test_the_commits_of_an_unreadable_job_are_mirrored_and_are_progress(spec: dict[str, Any]) -> None:
    world = await running(restarts={"maxFailures": 1})
    world.controllers.end_pod(world.pods[0], 1)
    await world.run_until_settled()
    good = spoil(world, **spec)["spec"]
    await world.run_until_settled(rounds=3)
    world.receive_report(training_report(sequence=9, step=90))
    await world.run_until_settled(rounds=3)
    assert world.latest == (9, 90)
    assert await world.record_writes(rounds=3) == []
    raw = world.cluster.objects["checkpointedtrainingjobs", "default", "lm"]
    world.cluster.put("checkpointedtrainingjobs", raw | {"spec": good})
    world.controllers.end_pod(world.pods[0], 1)
    await world.run_until_settled(rounds=20)
    assert world.phase() is Phase.RUNNING, "the commit has refilled the budget"


async def test_an_unreadable_job_says_so_and_shows_its_commits_though_its_stop_is_refused() -> None:
    world = await running()
    denied = InvalidObjectError(403, 'admission webhook "labels.corp" denied the request')
    world.cluster.refusals["apply", "jobsets"] = denied
    world.receive_report(training_report(sequence=9, step=90))
    spoil(world, placement="here", suspend=True)
    for _ in range(2):
        with pytest.raises(InvalidObjectError, match=r"labels\.corp"):
            await world.reconcile()
    assert world.condition("Accepted") == REFUSED
    assert world.latest == (9, 90)


def test_of_a_status_that_a_newer_operator_wrote_what_is_known_is_read() -> None:
    raw = training_job()
    raw["metadata"]["uid"] = "1"
    attempts = [{"start": "2027-01-01T00:00:00Z", "number": n} for n in range(40)]
    newer = {"type": "Fast", "status": "Perhaps", "reason": "X", "lastTransitionTime": "2027-01-01T00:00:00Z"}
    raw["status"] = {"attempts": attempts, "phase": "Dreaming", "conditions": [newer]}
    job = read_object(CheckpointedTrainingJob, raw).value
    assert job is not None
    assert [entry.number for entry in job.status.attempts] == list(range(30, 40)), "the newest"
