"""Test jobs of another version: they restart with the settings that were accepted last, and their status is kept."""

import copy
from collections.abc import Mapping
from typing import Any, Final

import pytest

from fake_cluster.stories import play, run_job, table
from fake_cluster.world import World
from stepkeeper.contract import Identity
from stepkeeper_operator.api.reading import keep_unknown
from stepkeeper_operator.api.v1alpha1.trainingjob_status import TrainingJobStatus

JOBS: Final = "checkpointedtrainingjobs"
PLACE: Final = (JOBS, "default", "lm")
LABEL: Final = "stepkeeper.dev/jobset-number"
VARIABLE: Final = Identity.variable("jobset_number")
PATIENT: Final = {"maxFailures": 9, "backoff": {"initialSeconds": 1, "maxSeconds": 1}}
UNREADABLE: Final = "condition Accepted False/UnreadableSpec"
ROOT: Final = {"uri": "gs://bucket/runs/lm"}
CHOICES: Final[Mapping[str, dict[str, Any]]] = {
    "a placement": {"placement": {"gpu": {"count": 2}}},
    "an interval": {"checkpoint": ROOT | {"interval": {"minutes": 5}}},
    "a value": {"checkpoint": ROOT | {"interval": {"auto": {}}, "onDisruption": "Migrate"}},
    "an accelerator": {"placement": {"tpu": {"accelerator": "v9", "topology": "2x2x2"}}},
    "no object": {"checkpoint": 5, "placement": [], "template": "t"},
}
choices: Final = pytest.mark.parametrize("spec", CHOICES.values(), ids=CHOICES)


def spec_of(world: World) -> dict[str, Any]:
    return dict(world.cluster.objects[PLACE]["spec"])


def kept_parts(world: World) -> tuple[object, object]:
    """Return what pods are made from, without the number of the JobSet, and their settings."""
    assert world.jobset is not None
    (workers,) = copy.deepcopy(world.jobset["spec"]["replicatedJobs"])
    pods = workers["template"]["spec"]["template"]
    (trainer,) = pods["spec"]["containers"]
    numbers = [part["metadata"]["labels"].pop(LABEL) for part in (workers["template"], pods)]
    numbers += [each["value"] for each in trainer["env"] if each["name"] == VARIABLE]
    assert set(numbers) == {world.jobset["metadata"]["labels"][LABEL]}
    trainer["env"] = [each for each in trainer["env"] if each["name"] != VARIABLE]
    (config,) = world.cluster.list_objects("configmaps")
    return workers, config["data"]["settings.json"]


@choices
async def test_a_job_whose_spec_is_of_a_newer_version_restarts_with_the_last_accepted_settings(
    spec: dict[str, Any],
) -> None:
    world = await run_job(restarts=PATIENT)
    good, before = spec_of(world), kept_parts(world)
    world.edit(**spec)
    await play(
        world, f"restart, fail, run 4, fail, run 4, {UNREADABLE}, jobsets 1, attempts 3, phase Running"
    )
    await play(
        world, "fail, run 20, jobsets 2, attempts 4, costs ApplicationError=3/3, phase Running, pods 2"
    )
    await play(world, "delete jobsets, run 20, jobsets 3, attempts 5, phase Running, pods 2, rests")
    await play(world, "suspend, run, phase Suspended, pods 0, resume, run, phase Running, pods 2")
    assert kept_parts(world) == before
    assert world.status.resources is not None
    assert world.status.resources.hosts == 2, "as the placement had it"
    started = [pod["metadata"]["uid"] for pod in world.pods]
    world.edit(**good)
    await play(world, "restart, run 20, condition Accepted True/SpecAccepted, phase Running")
    assert [pod["metadata"]["uid"] for pod in world.pods] == started, "the newer operator changes nothing"


@choices
async def test_it_is_started_also_by_an_operator_that_has_not_seen_its_jobset(spec: dict[str, Any]) -> None:
    world = await run_job(restarts=PATIENT)
    world.edit(**spec)
    await play(world, "delete jobsets, act, look, restart, run 20, jobsets 2, phase Running, pods 2")
    world = await play(World(suspend=True), "run")
    world.edit(**spec)
    await play(
        world, f"restart, run, {UNREADABLE}, phase Suspended, gone, resume, run, phase Running, pods 2"
    )


async def test_pods_on_a_lost_node_are_given_up_and_reports_are_judged() -> None:
    world = await run_job(restarts=PATIENT)
    world.edit(**CHOICES["an interval"])
    await play(world, "report 9 90, run, condition Reporting True/ReportsReceived, latest 9 90")
    await play(world, "lose n1, run 60, phase Running, pods 2")
    assert world.causes[0] == "NodeFailure"


async def test_its_pods_get_the_new_ca_and_keep_their_settings() -> None:
    world = await run_job()
    world.edit(**CHOICES["an interval"])
    (config,) = world.cluster.list_objects("configmaps")
    old = config["data"] | {"ca.crt": "the old CA", "settings.json": "of a newer operator"}
    world.cluster.put("configmaps", config | {"data": old})
    await play(world, "restart, run, rests")
    (config,) = world.cluster.list_objects("configmaps")
    assert config["data"] == old | {"ca.crt": "the CA"}


async def test_an_edit_that_was_accepted_counts_and_one_that_was_not_does_not() -> None:
    world = await play(await run_job(restarts=PATIENT), "edit image new, run 20")
    world.edit(**CHOICES["an interval"])
    await play(world, "edit image typo, run, delete jobsets, run 20, phase Running")
    images = {pod["spec"]["containers"][0]["image"] for pod in world.pods}
    assert images == {"trainer:2"}


@table(
    "change",
    {"none": ({},), "of an older operator": ({"settings.json": "{}", "ca.crt": "x"},)},
)
async def test_without_settings_that_were_ever_accepted_nothing_starts(change: dict[str, str]) -> None:
    world = World(**CHOICES["an interval"])
    if change:
        owner = {"kind": "CheckpointedTrainingJob", "name": "lm", "uid": spec_uid(world), "controller": True}
        meta = {"name": "lm-stepkeeper", "namespace": "default", "ownerReferences": [owner]}
        world.cluster.put("configmaps", {"metadata": meta, "data": change})
    await play(world, f"run, {UNREADABLE}, gone, rests, message Accepted Until then nothing new starts")


def spec_uid(world: World) -> str:
    return str(world.cluster.objects[PLACE]["metadata"]["uid"])


async def test_an_object_of_another_owner_is_named_before_a_spec_that_can_not_be_read() -> None:
    world = World(suspend=True)
    await play(world, "run")
    world.cluster.put("jobsets", {"metadata": {"name": "lm", "namespace": "default"}, "spec": IDLE})
    world.edit(**CHOICES["an interval"], suspend=False)
    await play(world, "run, condition Accepted False/JobSetNameTaken")
    await play(world, f"remove jobsets, wait 30, run 20, {UNREADABLE}, phase Running")


IDLE: Final = {"suspend": True, "replicatedJobs": []}
COMMIT: Final = {"sequence": 5, "step": 50, "uri": "gs://b/5"}
EMPTY: Final = {"attempts": [], "restarts": {"total": 1}}
ONE: Final = {"attempts": [{"number": 1}]}
NEXT: Final = {"sequence": 6, "step": 60, "uri": "gs://b/6"}


@table(
    "before, after, wanted",
    {
        "a field": ({"new": 1}, {"phase": "Running"}, {"new": 1, "phase": "Running"}),
        "nothing": (None, {"phase": "Running"}, {"phase": "Running"}),
        "one that is gone": ({"phase": "Running", "progress": {"step": 1}}, {}, {}),
        "deep": ({"progress": {"step": 1, "x": 2}}, {"progress": {"step": 3}}, {"progress": {"step": 3, "x": 2}}),
        "of another commit": (
            {"checkpoint": {"latest": COMMIT | {"crc": 1}, "y": []}},
            {"checkpoint": {"latest": NEXT}},
            {"checkpoint": {"latest": NEXT, "y": []}},
        ),
        "items": (
            {"checkpoint": {"recent": [COMMIT | {"crc": 1}, NEXT | {"crc": 2}]}},
            {"checkpoint": {"recent": [NEXT, NEXT | {"sequence": 7}]}},
            {"checkpoint": {"recent": [NEXT | {"crc": 2}, NEXT | {"sequence": 7}]}},
        ),
        "another type": ({"attempts": 5, "restarts": []}, EMPTY, EMPTY),
        "odd items": ({"attempts": [3, {"number": [1]}, {}]}, {"attempts": [{"number": 1}]}, ONE),
    },
)  # fmt: skip
def test_unknown_fields_of_a_status_are_kept(before: object, after: dict[str, Any], wanted: object) -> None:
    assert keep_unknown(TrainingJobStatus, before, after) == wanted


async def test_what_a_newer_operator_wrote_stays_in_the_status_whatever_happens() -> None:
    world = await play(await run_job(restarts=PATIENT), "report 3 30, fail, run 4")
    raw = world.cluster.objects[PLACE]
    status = raw["status"]
    newer = status | {
        "goodput": {"percent": 97},
        "progress": {"display": "30/1000"} | status["progress"],
        "attempts": [{"lostSteps": each["number"]} | each for each in status["attempts"]],
        "operator": {"hangs": 2} | status["operator"],
        "conditions": [*status["conditions"], pending(status)],
    }
    world.cluster.put(JOBS, raw | {"status": newer})
    await play(
        world, "restart, look, report 9 90, run, fail, run 20, suspend, run, resume, run, phase Running"
    )
    found = world.cluster.objects[PLACE]["status"]
    assert found["goodput"] == {"percent": 97}
    assert (found["progress"]["display"], found["operator"]["hangs"]) == ("30/1000", 2)
    assert [each.get("lostSteps") for each in found["attempts"]][:3] == [1, 2, None]
    assert pending(status) in found["conditions"]


def pending(status: dict[str, Any]) -> dict[str, Any]:
    """Make a condition that this version doesn't have."""
    return {**status["conditions"][0], "type": "PendingChanges", "reason": "Edited"}
