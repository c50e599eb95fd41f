"""Test writes that the API server refuses: each is told, and holds up none that doesn't rely on it."""

import contextlib
from typing import Any

import pytest

from fake_cluster.world import World
from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus, Phase
from stepkeeper_operator.errors import ApiError, InvalidObjectError
from stepkeeper_operator.facts.raw import RawObject

CONFIG_MAP_WRITES = ("apply", "configmaps")
STATUS_WRITES = ("apply", "checkpointedtrainingjobs")
DENIED = InvalidObjectError(403, 'admission webhook "labels.corp" denied the request: a label is missing')
WEBHOOK_DOWN = ApiError(500, 'InternalError failed calling webhook "labels.corp": no endpoints available')
UNDECLARED = ApiError(500, "failed to create typed patch object: .status.new: field not declared in schema")


async def run(world: World, rounds: int, *, pace_s: float = 5.0) -> None:
    """Run operator and controllers in turn, however often a reconcile fails."""
    for _ in range(rounds):
        with contextlib.suppress(ApiError):
            await world.reconcile()
        world.controllers.sync()
        world.now += pace_s


def lose_answer(world: World, plural: str, error: ApiError) -> None:
    """Let the next write of this kind succeed, and its client hear only the error."""
    record = world.cluster.on_change

    def lose(changed: str, raw: RawObject, deleted: bool) -> None:  # a plain callable
        record(changed, raw, deleted)
        if changed == plural:
            world.cluster.on_change = record
            raise error

    world.cluster.on_change = lose


async def running(**spec: Any) -> World:
    world = World(**spec)
    await world.run_until_settled(rounds=4)
    assert world.phase() is Phase.RUNNING
    return world


def accepted(world: World) -> str:
    return next(c.message for c in world.status.conditions if c.type == "Accepted")


async def test_a_refused_config_map_is_told_and_holds_up_the_jobset_alone() -> None:
    world = World()
    quota = 'configmaps "lm-stepkeeper" is forbidden: exceeded quota: objects'
    world.cluster.refusals[CONFIG_MAP_WRITES] = ApiError(403, quota)
    await run(world, 5)
    assert world.jobset is None
    assert world.condition("Accepted") == (ConditionStatus.FALSE, "QuotaExceeded")
    assert quota in accepted(world)
    assert "ConfigMap" in accepted(world)
    assert world.events.count("QuotaExceeded") == 1
    world.cluster.refusals.clear()
    await run(world, 5)
    assert world.phase() is Phase.RUNNING
    assert world.condition("Accepted") == (ConditionStatus.TRUE, "SpecAccepted")


async def test_a_job_is_suspended_though_its_new_settings_are_refused() -> None:
    world = await running()
    world.cluster.refusals[CONFIG_MAP_WRITES] = DENIED
    world.edit(checkpoint={"uri": "gs://bucket/runs/lm", "interval": {"steps": 50}})
    await run(world, 2)
    world.edit(suspend=True)
    await run(world, 10)
    assert world.phase() is Phase.SUSPENDED
    assert world.pods == []


async def test_a_job_is_not_resumed_with_the_settings_of_before() -> None:
    world = await running()
    world.edit(suspend=True)
    await run(world, 10)
    world.cluster.refusals[CONFIG_MAP_WRITES] = ApiError(500, "InternalError etcd has no leader")
    world.edit(suspend=False, checkpoint={"uri": "gs://bucket/other", "interval": {"steps": 50}})
    await run(world, 5)
    assert world.jobset is not None
    assert world.jobset["spec"]["suspend"] is True
    assert world.pods == []
    world.cluster.refusals.clear()
    await run(world, 5)
    assert world.phase() is Phase.RUNNING
    assert "gs://bucket/other" in str(world.cluster.list_objects("configmaps"))


async def test_a_lost_node_is_given_up_though_new_settings_are_refused() -> None:
    world = await running()
    world.cluster.refusals[CONFIG_MAP_WRITES] = DENIED
    world.edit(checkpoint={"uri": "gs://bucket/runs/lm", "interval": {"steps": 50}})
    world.lose_node("n1")
    await run(world, 60)
    assert world.causes[0] == "NodeFailure"
    assert world.condition("Accepted") == (ConditionStatus.FALSE, "Forbidden")


async def test_a_refused_suspension_is_told_in_the_api_servers_words() -> None:
    world = await running()
    world.cluster.refusals["apply", "jobsets"] = DENIED
    world.edit(suspend=True)
    await run(world, 3)
    assert world.condition("Accepted") == (ConditionStatus.FALSE, "Forbidden")
    assert str(DENIED) in accepted(world)
    world.edit(suspend=False)  # nobody asks for the refused write any more
    await run(world, 3)
    assert world.condition("Accepted") == (ConditionStatus.TRUE, "SpecAccepted")


async def test_a_stop_that_is_refused_after_the_jobs_end_is_told() -> None:
    world = await running(restarts={"fatalExitCodes": [3]})
    world.cluster.refusals["apply", "jobsets"] = DENIED
    world.controllers.end_pod(world.pods[0], 3)
    for _ in range(4):  # JobSet's controller is late
        with contextlib.suppress(ApiError):
            await world.reconcile()
    assert world.phase() is Phase.FAILED
    assert world.condition("Accepted") == (ConditionStatus.FALSE, "Forbidden")
    assert str(DENIED) in accepted(world)
    assert world.events.count("Forbidden") == 1
    world.cluster.refusals.clear()
    await run(world, 8)
    assert {pod["status"]["phase"] for pod in world.pods} <= {"Failed"}
    assert world.condition("Accepted") == (ConditionStatus.TRUE, "SpecAccepted")


async def test_a_record_that_can_not_be_deleted_after_its_time_to_live_says_so() -> None:
    world = await running(ttlSecondsAfterFinished=60)
    world.cluster.refusals["delete", "checkpointedtrainingjobs"] = ApiError(403, "user may not delete it")
    for pod in world.pods:
        world.controllers.end_pod(pod, 0)
    await run(world, 20)
    assert world.phase() is Phase.COMPLETE
    assert world.condition("Accepted") == (ConditionStatus.FALSE, "Forbidden")
    assert "to delete the job, whose time to live is over" in accepted(world)


async def test_a_webhook_that_is_down_is_told_once_that_lasts() -> None:
    world = World()
    world.cluster.refusals["create", "jobsets"] = WEBHOOK_DOWN
    await run(world, 5)
    assert world.condition("Accepted") == (ConditionStatus.TRUE, "SpecAccepted"), "it may only restart"
    await run(world, 15)
    assert world.condition("Accepted") == (ConditionStatus.FALSE, "Rejected")
    assert str(WEBHOOK_DOWN) in accepted(world)
    assert world.events.count("Rejected") == 1


async def test_a_refusal_that_only_names_other_numbers_is_told_once() -> None:
    world = await running()
    world.edit(suspend=True)
    told: list[str] = []
    for port in range(40000, 40020):
        text = f'failed calling webhook "m.jobset": read tcp 10.0.0.5:{port}: connection reset by peer'
        world.cluster.refusals["apply", "jobsets"] = ApiError(500, text)
        await run(world, 1)
        told.append(accepted(world))
    assert world.condition("Accepted") == (ConditionStatus.FALSE, "Rejected")
    assert len(set(told[15:])) == 1
    assert world.events.count("Rejected") == 1


async def test_a_refusal_of_an_edited_spec_is_told_anew() -> None:
    world = World()
    for n_hosts, asked in ((3, 12), (4, 16)):
        quota = f'jobsets "lm" is forbidden: exceeded quota: tpu, requested: {asked}, used: 0, limited: 8'
        world.cluster.refusals["create", "jobsets"] = ApiError(403, quota)
        world.edit(placement={"hosts": {"count": n_hosts}})
        await run(world, 20)
        assert quota in accepted(world)


async def test_a_refusal_is_over_once_the_jobset_is_there_whatever_was_answered() -> None:
    world = World()
    timeout = ApiError(504, "Timeout: request did not complete within the allotted timeout")
    world.cluster.refusals["create", "jobsets"] = timeout
    await run(world, 20)
    assert world.condition("Accepted") == (ConditionStatus.FALSE, "Rejected")
    world.cluster.refusals.clear()
    lose_answer(world, "jobsets", timeout)
    await run(world, 30)
    assert world.phase() is Phase.RUNNING
    assert world.condition("Accepted") == (ConditionStatus.TRUE, "SpecAccepted")


async def test_a_status_that_arrived_though_its_answer_was_lost_is_no_failure_any_more() -> None:
    world = await running()
    world.edit(ttlSecondsAfterFinished=3600)  # its generation is all that is to be written
    lose_answer(world, "checkpointedtrainingjobs", ApiError(0, "no answer: TimeoutError()"))
    await run(world, 5)
    world.now += 7200
    world.cluster.refusals[STATUS_WRITES] = ApiError(0, "no answer: TimeoutError()")
    world.edit(suspend=True)
    await run(world, 1)
    assert "StatusNotWritten" not in world.events


async def test_a_job_that_is_deleted_meanwhile_has_no_unwritten_status() -> None:
    world = await running()
    gone = 'PATCH: 404 NotFound checkpointedtrainingjobs.stepkeeper.dev "lm" not found'
    world.cluster.refusals[STATUS_WRITES] = ApiError(404, gone)
    world.edit(suspend=True)
    await run(world, 1)
    assert "StatusNotWritten" not in world.events


@pytest.mark.parametrize("refusal", [UNDECLARED, DENIED], ids=["undeclared field", "denied"])
async def test_a_status_that_can_not_be_written_is_told_by_one_event(refusal: ApiError) -> None:
    world = World()
    world.cluster.refusals[STATUS_WRITES] = refusal
    await run(world, 30)
    assert world.events == ["StatusNotWritten"]
    assert world.jobset is None, "its number is in no status"


async def test_pods_of_a_lost_node_are_given_up_though_the_status_can_not_be_written() -> None:
    world = await running()
    world.cluster.refusals[STATUS_WRITES] = UNDECLARED
    world.lose_node("n1")
    await run(world, 60)
    assert "n1" not in {pod["spec"]["nodeName"] for pod in world.pods if pod["status"]["phase"] == "Running"}


async def test_an_unreadable_job_is_suspended_though_its_status_can_not_be_written() -> None:
    world = await running()
    raw = world.cluster.objects["checkpointedtrainingjobs", "default", "lm"]
    world.cluster.refusals[STATUS_WRITES] = InvalidObjectError(422, "spec.placement is invalid")
    spec = raw["spec"] | {"placement": "here", "suspend": True}
    world.cluster.put("checkpointedtrainingjobs", raw | {"spec": spec})
    await run(world, 3)
    assert world.pods == []
