"""Test writes that the API server refuses: each is told, and holds up none that doesn't rely on it."""

import contextlib

import pytest

from fake_cluster.world import World, running
from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus, Phase
from stepkeeper_operator.errors import ApiError, InvalidObjectError

CONFIG_MAP_WRITES = ("apply", "configmaps")
MOST_CONDITIONS = 16
STATUS_WRITES = ("apply", "checkpointedtrainingjobs")
DENIED = InvalidObjectError(403, 'admission webhook "labels.corp" denied the request: a label is missing')
WEBHOOK_DOWN = ApiError(500, 'InternalError failed calling webhook "labels.corp": no endpoints available')
UNDECLARED = ApiError(500, "failed to create typed patch object: .status.new: field not declared in schema")


async def run(world: World, rounds: int) -> None:
    """Run operator and controllers in turn, however often a reconcile fails."""
    for _ in range(rounds):
        with contextlib.suppress(ApiError):
            await world.reconcile()
        world.controllers.sync()
        world.now += 5.0


async def test_a_refused_config_map_is_told_and_holds_up_the_jobset_alone() -> None:
    world = World()
    quota = 'configmaps "lm-stepkeeper" is forbidden: exceeded quota: objects'
    world.cluster.refusals[CONFIG_MAP_WRITES] = ApiError(403, quota)
    await run(world, 5)
    assert world.jobset is None
    assert world.condition("Accepted") == (ConditionStatus.FALSE, "QuotaExceeded")
    assert quota in world.message("Accepted")
    assert "ConfigMap" in world.message("Accepted")
    assert world.events.count("QuotaExceeded") == 1
    world.cluster.refusals.clear()
    await run(world, 5)
    assert world.phase() is Phase.RUNNING
    assert world.condition("Accepted") == (ConditionStatus.TRUE, "SpecAccepted")


async def test_a_job_is_not_resumed_with_the_settings_of_before() -> None:
    world = await running()
    world.edit(suspend=True)
    await run(world, 10)
    world.cluster.refusals[CONFIG_MAP_WRITES] = ApiError(500, "InternalError etcd has no leader")
    world.edit(suspend=False, checkpoint={"uri": "gs://bucket/other", "interval": {"every": {"steps": 50}}})
    await run(world, 5)
    assert world.jobset is not None
    assert world.jobset["spec"]["suspend"] is True
    assert world.pods == []
    world.cluster.refusals.clear()
    await run(world, 5)
    assert world.phase() is Phase.RUNNING
    assert "gs://bucket/other" in str(world.cluster.list_objects("configmaps"))


async def test_a_webhook_that_is_down_is_told_once_that_lasts() -> None:
    world = World()
    world.cluster.refusals["create", "jobsets"] = WEBHOOK_DOWN
    await run(world, 5)
    assert world.condition("Accepted") == (ConditionStatus.TRUE, "SpecAccepted"), "it may only restart"
    await run(world, 15)
    assert world.condition("Accepted") == (ConditionStatus.FALSE, "Rejected")
    assert str(WEBHOOK_DOWN) in world.message("Accepted")
    assert world.events.count("Rejected") == 1


async def test_a_refusal_that_only_names_other_numbers_is_told_once() -> None:
    world = await running()
    world.edit(suspend=True)
    told: list[str] = []
    for port in range(40000, 40020):
        text = f'failed calling webhook "m.jobset": read tcp 10.0.0.5:{port}: connection reset by peer'
        world.cluster.refusals["apply", "jobsets"] = ApiError(500, text)
        await run(world, 1)
        told.append(world.message("Accepted"))
    assert world.condition("Accepted") == (ConditionStatus.FALSE, "Rejected")
    assert len(set(told[15:])) == 1
    assert world.events.count("Rejected") == 1


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


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            ApiError(403, 'jobsets "lm" is forbidden: exceeded quota: q, requested: 1, used: 5'),
            "QuotaExceeded",
        ),
        (ApiError(403, "user may not create jobsets"), "Forbidden"),
        (InvalidObjectError(422, "env is too long"), "Rejected"),
    ],
)
async def test_a_refused_jobset_is_told_in_the_api_servers_words_and_tried_again(
    error: ApiError, reason: str
) -> None:
    world = World()
    world.cluster.refusals["create", "jobsets"] = error
    for _ in range(20):
        await world.reconcile()
        world.now += 6
    assert world.condition("Accepted") == (ConditionStatus.FALSE, reason)
    assert str(error) in world.message("Accepted")
    assert world.events.count(reason) == 1
    tries = [write for write in world.cluster.writes if write.plural == "jobsets"]
    assert len(tries) == 2  # in 2 minutes
    assert world.status.operator.job_sets == 1
    for _ in range(2):
        world.restart_operator()
        await world.run_until_settled(rounds=4)
        assert world.condition("Accepted") == (ConditionStatus.FALSE, reason)
    assert world.events.count(reason) == 1, "it stands over a restart of the operator"
    world.cluster.refusals.clear()
    world.now += 60
    await world.run_until_settled()
    assert world.phase() is Phase.RUNNING
    assert world.condition("Accepted") == (ConditionStatus.TRUE, "SpecAccepted")


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_refusal_of_a_write_that_is_not_asked_for_any_more_does_not_stand(*, restarted: bool) -> None:
    world = await running()
    world.cluster.refusals["apply", "jobsets"] = DENIED
    world.edit(suspend=True)
    await run(world, 3)
    assert world.condition("Accepted") == (ConditionStatus.FALSE, "Forbidden")
    assert str(DENIED) in world.message("Accepted")
    if restarted:
        world.stop_operator()
    world.edit(suspend=False)
    if restarted:
        world.restart_operator()
    await run(world, 3)
    assert world.condition("Accepted") == (ConditionStatus.TRUE, "SpecAccepted")


async def test_a_job_is_suspended_and_a_lost_node_given_up_though_its_new_settings_are_refused() -> None:
    world = await running()
    world.cluster.refusals[CONFIG_MAP_WRITES] = DENIED
    world.edit(checkpoint={"uri": "gs://bucket/runs/lm", "interval": {"every": {"steps": 50}}})
    world.lose_node("n1")
    await run(world, 60)
    assert world.causes[0] == "NodeFailure"
    assert world.condition("Accepted") == (ConditionStatus.FALSE, "Forbidden")
    world.edit(suspend=True)
    await run(world, 10)
    assert world.phase() is Phase.SUSPENDED
    assert world.pods == []


@pytest.mark.parametrize("n_foreign", [MOST_CONDITIONS, MOST_CONDITIONS + 4])
@pytest.mark.parametrize("readable", [True, False])
async def test_conditions_of_others_leave_room_for_the_jobs_own(n_foreign: int, *, readable: bool) -> None:
    world = World() if readable else World(placement="here")
    theirs = {
        "status": "True",
        "reason": "Theirs",
        "message": "",
        "lastTransitionTime": "2027-01-01T00:00:00Z",
    }
    foreign = [theirs | {"type": f"example.com/{index:02}"} for index in range(n_foreign)]
    place = ("checkpointedtrainingjobs", "default", "lm")
    world.cluster.put(place[0], world.cluster.objects[place] | {"status": {"conditions": foreign}})
    await world.run_until_settled()
    kinds = [c["type"] for c in world.cluster.objects[place]["status"]["conditions"]]
    assert len(kinds) == MOST_CONDITIONS
    assert ({"Accepted", "Running", "Suspended"} if readable else {"Accepted"}) < set(kinds)
    assert any(kind.startswith("example.com/") for kind in kinds)
    assert await world.record_writes(rounds=3) == []
