"""Test that jobs which this operator can't accept, or can't even read, are still managed."""

from typing import Any

import pytest

from fake_cluster.kubelets import training_report
from fake_cluster.world import World, training_job
from stepkeeper_operator.api.reading import read_object
from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus, Phase
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.errors import ApiError, InvalidObjectError

REFUSAL = {"ttlSecondsAfterFinished": "soon"}
REFUSED = (ConditionStatus.FALSE, "UnreadableSpec")


async def running(**spec: Any) -> World:
    world = World(**spec)
    await world.run_until_settled(rounds=4)
    assert world.phase() is Phase.RUNNING
    return world


def message_of(world: World, kind: str) -> str:
    return next(c.message for c in world.status.conditions if c.type == kind)


def raw_status(world: World) -> dict[str, Any]:
    raw = world.cluster.objects["checkpointedtrainingjobs", "default", "lm"]
    return dict(raw.get("status") or {})


async def test_the_commits_of_a_refused_job_that_runs_are_mirrored() -> None:
    world = await running()
    world.edit(**REFUSAL)
    await world.run_until_settled(rounds=2)
    world.receive_report(training_report(sequence=9, step=90))
    world.now += 70
    await world.run_until_settled(rounds=2)
    assert world.condition("Accepted") == REFUSED
    assert world.phase() is Phase.RUNNING
    assert world.status.checkpoint is not None
    assert world.status.checkpoint.latest is not None
    assert world.status.checkpoint.latest.sequence == 9


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
    raw = world.cluster.objects["checkpointedtrainingjobs", "default", "lm"]
    world.cluster.put(
        "checkpointedtrainingjobs",
        raw | {"spec": {key: value for key, value in raw["spec"].items() if key not in REFUSAL}},
    )
    await world.run_until_settled()
    assert world.phase() is Phase.RUNNING


async def test_a_refused_edit_of_the_template_ends_nothing_and_starts_nothing() -> None:
    world = await running()
    template = {"spec": {"containers": [{"name": "other", "image": "x"}]}}
    world.edit(template=template)
    await world.run_until_settled()
    assert world.condition("Accepted") == (ConditionStatus.FALSE, "NoTrainer")
    assert world.phase() is Phase.RUNNING
    world.cluster.mark_deleted("jobsets", "default", "lm", grace_s=0)
    await world.run_until_settled()
    assert world.jobset is None
    assert "not accepted" in message_of(world, "Running")


async def test_fields_of_a_newer_crd_hold_up_nothing_and_are_reported() -> None:
    """After a rollback every job may have them, since the API server adds defaults and Helm rolls no CRDs back."""
    world = await running()
    pods = [pod["metadata"]["uid"] for pod in world.pods]
    placement = {"hosts": {"count": 2, "futureShape": "ring"}, "futureZone": "a"}
    world.edit(placement=placement, futureLimit=5)
    await world.run_until_settled()
    assert world.condition("Accepted") == (ConditionStatus.TRUE, "UnknownFields")
    named = "spec.futureLimit, spec.placement.futureZone, spec.placement.hosts.futureShape"
    assert f"this operator doesn't know {named}" in message_of(world, "Accepted")
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


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"ttlSecondsAfterFinished": "x"}, "spec.ttlSecondsAfterFinished: Input should be a valid integer"),
        (
            {"restarts": {"maxFailures": [], "fatalExitCodes": [1, "a", 3, "b"]}},
            "spec.restarts.fatalExitCodes[1]",
        ),
    ],
)
async def test_an_unreadable_part_of_the_spec_is_named_and_the_rest_is_managed(
    spec: dict[str, Any], said: str
) -> None:
    world = await running()
    raw = world.cluster.objects["checkpointedtrainingjobs", "default", "lm"]
    world.cluster.put("checkpointedtrainingjobs", raw | {"spec": raw["spec"] | spec | {"suspend": True}})
    await world.run_until_settled()
    accepted = next(c for c in raw_status(world)["conditions"] if c["type"] == "Accepted")
    assert (accepted["status"], accepted["reason"]) == ("False", "UnreadableSpec")
    assert said in accepted["message"]
    assert raw_status(world)["phase"] == "Suspended"
    assert world.events.count("UnreadableSpec") == 1


async def test_a_job_that_can_not_be_read_at_all_is_told_so_and_suspended() -> None:
    world = await running()
    raw = world.cluster.objects["checkpointedtrainingjobs", "default", "lm"]
    world.cluster.put(
        "checkpointedtrainingjobs", raw | {"spec": raw["spec"] | {"placement": "here", "suspend": True}}
    )
    await world.run_until_settled()
    status = raw_status(world)
    accepted = next(c for c in status["conditions"] if c["type"] == "Accepted")
    assert (accepted["status"], accepted["reason"]) == ("False", "UnreadableSpec")
    assert "spec.placement" in accepted["message"]
    assert len(status["attempts"]) == 1
    assert world.jobset is not None
    assert world.jobset["spec"]["suspend"] is True
    assert world.pods == []
    assert world.events.count("UnreadableSpec") == 1
    assert await world.record_writes(rounds=3) == []


async def test_a_status_of_a_newer_operator_is_read_as_far_as_it_is_known() -> None:
    world = await running()
    raw = world.cluster.objects["checkpointedtrainingjobs", "default", "lm"]
    newer = {"type": "Fast", "status": "Perhaps", "reason": "X", "lastTransitionTime": "2027-01-01T00:00:00Z"}
    status = raw["status"] | {"phase": "Dreaming", "conditions": [newer, *raw["status"]["conditions"]]}
    world.cluster.put("checkpointedtrainingjobs", raw | {"status": status})
    await world.run_until_settled()
    assert world.phase() is Phase.RUNNING
    assert len(world.status.attempts) == 1
    assert world.condition("Accepted") == (ConditionStatus.TRUE, "SpecAccepted")


@pytest.mark.parametrize("spec", [{"ttlSecondsAfterFinished": "x"}, {"placement": "here"}, {"checkpoint": 5}])
async def test_the_commits_of_an_unreadable_job_are_mirrored_and_are_progress(spec: dict[str, Any]) -> None:
    world = await running(restarts={"maxFailures": 1})
    world.controllers.end_pod(world.pods[0], 1)
    await world.run_until_settled()
    raw = world.cluster.objects["checkpointedtrainingjobs", "default", "lm"]
    world.cluster.put("checkpointedtrainingjobs", raw | {"spec": raw["spec"] | spec})
    await world.run_until_settled(rounds=3)
    world.receive_report(training_report(sequence=9, step=90))
    await world.run_until_settled(rounds=3)
    assert raw_status(world)["checkpoint"]["latest"]["step"] == 90
    assert await world.record_writes(rounds=3) == []
    now = world.cluster.objects["checkpointedtrainingjobs", "default", "lm"]
    world.cluster.put("checkpointedtrainingjobs", now | {"spec": raw["spec"]})
    world.controllers.end_pod(world.pods[0], 1)
    await world.run_until_settled(rounds=20)
    assert world.phase() is Phase.RUNNING, "the commit has refilled the budget"


async def test_an_unreadable_job_says_so_and_shows_its_commits_though_its_stop_is_refused() -> None:
    world = await running()
    raw = world.cluster.objects["checkpointedtrainingjobs", "default", "lm"]
    denied = InvalidObjectError(403, 'admission webhook "labels.corp" denied the request')
    world.cluster.refusals["apply", "jobsets"] = denied
    world.receive_report(training_report(sequence=9, step=90))
    spec = raw["spec"] | {"placement": "here", "suspend": True}
    world.cluster.put("checkpointedtrainingjobs", raw | {"spec": spec})
    for _ in range(2):
        with pytest.raises(InvalidObjectError, match=r"labels\.corp"):
            await world.reconcile()
    assert world.condition("Accepted") == (ConditionStatus.FALSE, "UnreadableSpec")
    assert world.status.checkpoint is not None
    assert world.status.checkpoint.latest is not None
    assert world.status.checkpoint.latest.sequence == 9


def test_of_a_list_that_a_newer_operator_made_longer_the_newest_are_read() -> None:
    raw = training_job()
    raw["metadata"]["uid"] = "1"
    attempt = {"start": "2027-01-01T00:00:00Z"}
    raw["status"] = {"attempts": [attempt | {"number": n} for n in range(40)]}
    job = read_object(CheckpointedTrainingJob, raw).value
    assert job is not None
    assert [entry.number for entry in job.status.attempts] == list(range(30, 40))


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            ApiError(403, 'jobsets "lm" is forbidden: exceeded quota: q, requested: 1, used: 5'),
            "QuotaExceeded",
        ),
        (ApiError(403, "user may not create jobsets"), "Forbidden"),
        (ApiError(400, "admission webhook denied the request"), "Rejected"),
    ],
)
async def test_a_jobset_that_the_api_server_refuses_is_a_condition_in_its_words_and_tried_again(
    error: ApiError, reason: str
) -> None:
    world = World()
    world.cluster.refusals["create", "jobsets"] = error
    for _ in range(20):
        await world.reconcile()
        world.now += 6
    assert world.condition("Accepted") == (ConditionStatus.FALSE, reason)
    assert str(error) in message_of(world, "Accepted")
    assert world.events.count(reason) == 1
    tries = [write for write in world.cluster.writes if write.plural == "jobsets"]
    assert len(tries) == 2  # in 2 minutes
    world.cluster.refusals.clear()
    world.now += 60
    await world.run_until_settled()
    assert world.phase() is Phase.RUNNING
    assert world.condition("Accepted") == (ConditionStatus.TRUE, "SpecAccepted")


async def test_live_pods_of_a_job_with_a_longer_name_hold_up_nothing() -> None:
    world = World()
    labels = {"stepkeeper.dev/job-uid": "another"}
    owner = {"kind": "Job", "name": "lm-w-1-2-w-0", "uid": "j", "controller": True}
    meta = {
        "name": "lm-w-1-2-w-0-0-abcde",
        "namespace": "default",
        "labels": labels,
        "ownerReferences": [owner],
    }
    world.cluster.put("pods", {"metadata": meta, "spec": {"nodeName": "n1"}, "status": {"phase": "Running"}})
    job = {"name": "lm-w-1-2-w-0", "namespace": "default", "uid": "j", "labels": labels}
    js = {"kind": "JobSet", "name": "lm-w-1-2", "uid": "js", "controller": True}
    world.cluster.put("jobs", {"metadata": job | {"ownerReferences": [js]}, "spec": {}, "status": {}})
    await world.reconcile()
    assert world.jobset is not None


@pytest.mark.parametrize("n_hosts", [1, 4])
async def test_a_refused_edit_of_the_placement_changes_nothing_that_is_said_of_what_runs(
    n_hosts: int,
) -> None:
    world = await running()
    world.edit(placement={"hosts": {"count": n_hosts}}, **REFUSAL)
    await world.run_until_settled()
    assert world.condition("Accepted") == REFUSED
    assert world.phase() is Phase.RUNNING
    assert message_of(world, "Running") == "2 of 2 pods run"
    world.controllers.end_pod(world.pods[0], 0)
    await world.run_until_settled()
    assert message_of(world, "Running") == "1 of 2 pods have exited 0"
    world.receive_report(training_report(sequence=3, step=30))
    await world.reconcile()
    world.now += 3601
    await world.reconcile()
    assert world.condition("Progressing") == (ConditionStatus.FALSE, "PodsFinishedOthersRun")
