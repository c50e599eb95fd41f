"""Test what is refused: jobs that can't be accepted or read, and writes that the API server refuses."""

import contextlib
from typing import Any

import pytest

from fake_cluster.stories import play, run_job, table
from fake_cluster.world import World, training_job
from stepkeeper_operator.api.reading import read_object
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.errors import ApiError, InvalidObjectError

AT = {"uri": "gs://bucket/lm"}
TWO = {"every": {"steps": 5}, "continuous": {}}
REFUSED = "condition Accepted False/UnreadableSpec"


async def test_fields_of_a_newer_crd_hold_up_nothing_and_are_reported() -> None:
    """After a rollback every job may have them, since the API server adds defaults and Helm rolls no CRDs back."""
    world = await run_job()
    pods = [pod["metadata"]["uid"] for pod in world.pods]
    placement = {"hosts": {"count": 2, "futureShape": "ring"}, "futureZone": "a"}
    world.edit(placement=placement, futureLimit=5)
    await play(world, "run, condition Accepted True/UnknownFields")
    named = "spec.futureLimit, spec.placement.futureZone, spec.placement.hosts.futureShape"
    assert f"this operator doesn't know {named}" in world.message("Accepted")
    assert [pod["metadata"]["uid"] for pod in world.pods] == pods, "nothing was started anew"
    await play(
        world, "fail, run 20, phase Running, costs ApplicationError=1/1, suspend, run, phase Suspended"
    )
    assert world.events.count("UnknownFields") == 1


@table(
    "spec, said",
    {
        "a field": ({"ttlSecondsAfterFinished": "x"}, "spec.ttlSecondsAfterFinished: Input should be"),
        "an entry of a list": (
            {"restarts": {"maxFailures": [], "fatalExitCodes": [1, "a"]}},
            "spec.restarts.fatalExitCodes[1]",
        ),
        "all": ({"placement": "here"}, "spec.placement: is not an object. Fix the spec"),
        "an unknown member": (
            {"checkpoint": AT | {"interval": {"minutes": 5}}},
            "doesn't know minutes. Fix the spec",
        ),
        "two members": ({"checkpoint": AT | {"interval": TWO}}, "interval: only one of every"),
    },
)
async def test_an_unreadable_part_of_the_spec_is_named_and_the_job_is_suspended_all_the_same(
    spec: dict[str, Any], said: str
) -> None:
    world = await run_job()
    world.edit(**spec, suspend=True)
    stopped = "attempts 1, pods 0, phase Suspended, suspended, events UnreadableSpec 1, rests"
    await play(world, f"run, {REFUSED}, {stopped}, message Accepted {said}")


@pytest.mark.parametrize("ended", [False, True])
async def test_a_corrected_job_shows_nothing_of_the_spec_that_could_not_be_read(*, ended: bool) -> None:
    world = await play(await run_job(), "end 0, run" if ended else "look")
    good = world.job.spec.checkpoint.to_raw()
    world.edit(checkpoint=5)
    await play(world, f"restart, run 3, {REFUSED}")
    world.edit(checkpoint=good)
    await play(world, f"run 3, phase {'Complete' if ended else 'Running'}")
    assert [c.type for c in world.status.conditions if c.reason == "UnreadableSpec"] == []


@pytest.mark.parametrize("spec", [{"ttlSecondsAfterFinished": "x"}, {"placement": "here"}, {"checkpoint": 5}])
async def test_the_commits_of_an_unreadable_job_are_mirrored_and_are_progress(spec: dict[str, Any]) -> None:
    world = await play(await run_job(restarts={"maxFailures": 1}), "fail, run")
    good = world.cluster.objects["checkpointedtrainingjobs", "default", "lm"]["spec"]
    world.edit(**spec)
    await play(world, "run 3, report 9 90, run 3, latest 9 90, rests")
    raw = world.cluster.objects["checkpointedtrainingjobs", "default", "lm"]
    world.cluster.put("checkpointedtrainingjobs", raw | {"spec": good})
    await play(world, "fail, run 20, phase Running")  # the commit has refilled the budget


async def test_an_unreadable_job_says_so_and_shows_its_commits_though_its_stop_is_refused() -> None:
    world = await run_job()
    denied = InvalidObjectError(403, 'admission webhook "labels.corp" denied the request')
    world.cluster.refusals["apply", "jobsets"] = denied
    await play(world, "report 9 90")
    world.edit(placement="here", suspend=True)
    for _ in range(2):
        with pytest.raises(InvalidObjectError, match=r"labels\.corp"):
            await world.reconcile()
    await play(world, f"{REFUSED}, latest 9 90")


def test_of_a_status_that_a_newer_operator_wrote_what_is_known_is_read() -> None:
    raw = training_job()
    raw["metadata"]["uid"] = "1"
    attempts = [{"start": "2027-01-01T00:00:00Z", "number": n} for n in range(40)]
    newer = {"type": "Fast", "status": "Perhaps", "reason": "X", "lastTransitionTime": "2027-01-01T00:00:00Z"}
    raw["status"] = {"attempts": attempts, "phase": "Dreaming", "conditions": [newer]}
    job = read_object(CheckpointedTrainingJob, raw).value
    assert job is not None
    assert [entry.number for entry in job.status.attempts] == list(range(30, 40)), "the newest"


CONFIG_MAP_WRITES = ("apply", "configmaps")
MOST_CONDITIONS = 16
STATUS_WRITES = ("apply", "checkpointedtrainingjobs")
DENIED = InvalidObjectError(403, 'admission webhook "labels.corp" denied the request: a label is missing')
WEBHOOK_DOWN = ApiError(500, 'InternalError failed calling webhook "labels.corp": no endpoints available')
UNDECLARED = ApiError(500, "failed to create typed patch object: .status.new: field not declared in schema")
NO_QUOTA = ApiError(403, 'jobsets "lm" is forbidden: exceeded quota: objects')
ACCEPTED = "condition Accepted True/SpecAccepted"


async def run(world: World, rounds: int) -> None:
    """Run operator and controllers in turn, however often a reconcile fails."""
    for _ in range(rounds):
        with contextlib.suppress(ApiError):
            await world.reconcile()
        world.controllers.sync()
        world.now += 5.0


async def test_a_job_is_not_resumed_with_the_settings_of_before() -> None:
    world = await play(await run_job(), "suspend, run")
    world.cluster.refusals[CONFIG_MAP_WRITES] = ApiError(500, "InternalError etcd has no leader")
    world.edit(suspend=False, checkpoint={"uri": "gs://bucket/other", "interval": {"every": {"steps": 50}}})
    await run(world, 5)
    await play(world, "suspended, pods 0, accept")
    await run(world, 5)
    await play(world, "phase Running")
    assert "gs://bucket/other" in str(world.cluster.list_objects("configmaps"))


async def test_a_webhook_that_is_down_is_told_once_that_lasts() -> None:
    world = World()
    world.cluster.refusals["create", "jobsets"] = WEBHOOK_DOWN
    await run(world, 5)
    await play(world, ACCEPTED)  # it may only restart
    await run(world, 15)
    await play(
        world, f"condition Accepted False/Rejected, events Rejected 1, message Accepted {WEBHOOK_DOWN}"
    )


async def test_a_refusal_that_only_names_other_numbers_is_told_once() -> None:
    world = await play(await run_job(), "suspend")
    told: list[str] = []
    for port in range(40000, 40020):
        text = f'failed calling webhook "m.jobset": read tcp 10.0.0.5:{port}: connection reset by peer'
        world.cluster.refusals["apply", "jobsets"] = ApiError(500, text)
        await run(world, 1)
        told.append(world.message("Accepted"))
    await play(world, "condition Accepted False/Rejected, events Rejected 1")
    assert len(set(told[15:])) == 1


@pytest.mark.parametrize("refusal", [UNDECLARED, DENIED], ids=["undeclared field", "denied"])
async def test_a_status_that_can_not_be_written_is_told_by_one_event(refusal: ApiError) -> None:
    world = World()
    world.cluster.refusals[STATUS_WRITES] = refusal
    await run(world, 30)
    assert world.events == ["StatusNotWritten"]
    assert world.jobset is None, "its number is in no status"


async def test_pods_of_a_lost_node_are_given_up_though_the_status_can_not_be_written() -> None:
    world = await run_job()
    world.cluster.refusals[STATUS_WRITES] = UNDECLARED
    world.lose_node("n1")
    await run(world, 60)
    assert "n1" not in {pod["spec"]["nodeName"] for pod in world.pods if pod["status"]["phase"] == "Running"}


@table(
    "what, error, reason",
    {
        "a ConfigMap beyond a quota": (CONFIG_MAP_WRITES, NO_QUOTA, "QuotaExceeded"),
        "a JobSet beyond a quota": (("create", "jobsets"), NO_QUOTA, "QuotaExceeded"),
        "a role": (("create", "jobsets"), ApiError(403, "user may not create jobsets"), "Forbidden"),
        "a JobSet": (("create", "jobsets"), InvalidObjectError(422, "env is too long"), "Rejected"),
    },
)
async def test_what_is_refused_is_told_in_the_api_servers_words_and_tried_again(
    what: tuple[str, str], error: ApiError, reason: str
) -> None:
    world = World()
    world.cluster.refusals[what] = error
    await run(world, 24)
    refused = f"condition Accepted False/{reason}, events {reason} 1"
    await play(world, f"{refused}, gone, message Accepted {error}")
    assert what[1] != "configmaps" or "ConfigMap" in world.message("Accepted")
    tries = [write for write in world.cluster.writes if write.plural == "jobsets"]
    assert len(tries) == (2 if what[1] == "jobsets" else 0), "in 2 minutes"
    for _ in range(2):
        world.restart_operator()
        await run(world, 4)
        await play(world, f"jobsets 1, {refused}")  # it stands over a restart of the operator
    await play(world, f"accept, wait 60, run, phase Running, {ACCEPTED}")


@pytest.mark.parametrize("resume", ["resume", "away, resume, restart"])
async def test_a_refusal_of_a_write_that_is_not_asked_for_any_more_does_not_stand(resume: str) -> None:
    world = await play(await run_job(), "suspend")
    world.cluster.refusals["apply", "jobsets"] = DENIED
    await run(world, 3)
    await play(world, f"condition Accepted False/Forbidden, message Accepted {DENIED}")
    await play(world, resume)
    await run(world, 3)
    await play(world, ACCEPTED)


async def test_a_job_is_suspended_and_a_lost_node_given_up_though_its_new_settings_are_refused() -> None:
    world = await play(await run_job(), "edit interval 50, lose n1")
    world.cluster.refusals[CONFIG_MAP_WRITES] = DENIED
    await run(world, 60)
    assert world.causes[0] == "NodeFailure"
    await play(world, "condition Accepted False/Forbidden, suspend")
    await run(world, 10)
    await play(world, "phase Suspended, pods 0")


@pytest.mark.parametrize("n_foreign", [MOST_CONDITIONS, MOST_CONDITIONS + 4])
@pytest.mark.parametrize("readable", [True, False])
async def test_conditions_of_others_leave_room_for_the_jobs_own(n_foreign: int, *, readable: bool) -> None:
    world = World() if readable else World(placement="here")
    theirs = {"status": "True", "reason": "X", "message": "", "lastTransitionTime": "2027-01-01T00:00:00Z"}
    foreign = [theirs | {"type": f"example.com/{index:02}"} for index in range(n_foreign)]
    place = ("checkpointedtrainingjobs", "default", "lm")
    world.cluster.put(place[0], world.cluster.objects[place] | {"status": {"conditions": foreign}})
    await world.run_until_settled()
    kinds = [c["type"] for c in world.cluster.objects[place]["status"]["conditions"]]
    assert len(kinds) == MOST_CONDITIONS
    assert ({"Accepted", "Running", "Suspended"} if readable else {"Accepted"}) < set(kinds)
    assert any(kind.startswith("example.com/") for kind in kinds)
    assert await world.record_writes(rounds=3) == []
