"""Test edits of jobs: which of them restart pods, which show as pending, and the annotation that asks for a restart."""

import json
from typing import Any, Final

import pytest

from fake_cluster.facts import make_job
from fake_cluster.job_machines import machines, world_of
from fake_cluster.stories import play, run_job, stories, with_resources
from fake_cluster.world import World
from stepkeeper_operator.labels import TEMPLATE_HASH_ANNOTATION
from stepkeeper_operator.training_jobs.build.jobset import template_hash


def resized(**volume: Any) -> dict[str, Any]:
    return {"spec": {"containers": [], "volumes": [{"name": "scratch", **volume}]}}


SAME: Final[dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "memory": (with_resources("1Gi", 1), with_resources("1024Mi", 1)),
    "cpu": (with_resources(1, "100m"), with_resources("1", 0.1)),
    "a volume in memory": (
        resized(emptyDir={"sizeLimit": "1Gi"}),
        resized(emptyDir={"sizeLimit": 2**30}),
    ),
    "what a pod needs beside its containers": (
        {"spec": {"containers": [], "overhead": {"cpu": "250m"}}},
        {"spec": {"containers": [], "overhead": {"cpu": "0.25"}}},
    ),
    "exponents": (with_resources("1e3", 1), with_resources("1k", 1)),
}
OTHER: Final[dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "more": (with_resources("1Gi", 1), with_resources("1025Mi", 1)),
    "a driver's own words": (
        resized(csi={"driver": "d", "volumeAttributes": {"sizeLimit": "1Gi"}}),
        resized(csi={"driver": "d", "volumeAttributes": {"sizeLimit": "1024Mi"}}),
    ),
    "what is no quantity": (with_resources("sNaN", 1), with_resources("1Zi", 1)),
}


@pytest.mark.parametrize(("one", "two"), SAME.values(), ids=SAME)
def test_the_same_quantity_in_other_words_is_the_same_template(
    one: dict[str, Any], two: dict[str, Any]
) -> None:
    assert template_hash(make_job(template=one)) == template_hash(make_job(template=two))


@pytest.mark.parametrize(("one", "two"), OTHER.values(), ids=OTHER)
def test_other_quantities_and_words_are_another_template(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert template_hash(make_job(template=one)) != template_hash(make_job(template=two))


LARGE: Final = with_resources("1Gi", "100m")


@stories(
    {
        "while it runs": "edit memory Mi, run, jobsets 1, causes -, rests, restart, rests",
        "and another": "edit memory Mi, run, edit memory more, run, jobsets 2, causes Requested -",
        "after failures without a commit": "fail, run, edit memory Mi, run, starts 2, rests",
    }
)
async def test_an_edit_that_changes_no_amount_restarts_nothing(story: str) -> None:
    await play(await run_job(template=LARGE), story)


async def test_a_jobset_of_a_release_that_compared_words_is_kept_until_an_edit() -> None:
    """Release 0.1.0 hashed quantities as they are written, and compares that hash after a rollback."""
    world = await run_job(template=LARGE)
    make_it_of_0_1_0(world)
    await play(world, "restart, run, jobsets 1, causes -, rests, edit image new, run, jobsets 2")


async def test_it_is_kept_also_while_the_spec_can_not_be_read_and_once_it_can() -> None:
    world = await play(await run_job(template=LARGE), "edit ttl soon, run, delete jobsets, run 20, jobsets 2")
    make_it_of_0_1_0(world)
    await play(world, "restart, run, jobsets 2, rests, edit ttl later, run, jobsets 2, phase Running, rests")


async def test_one_of_a_job_with_the_annotation_is_replaced_once() -> None:
    world = await play(await run_job(template=LARGE), "ask 1, run, jobsets 2")
    make_it_of_0_1_0(world)
    await play(world, "restart, run, jobsets 3, restart, run, jobsets 3, rests")


def make_it_of_0_1_0(world: World) -> None:
    """Leave of the JobSet's annotations the one that release 0.1.0 writes and compares."""
    assert world.jobset is not None
    meta = world.jobset["metadata"]
    annotations = {TEMPLATE_HASH_ANNOTATION: "5e0c7856bc47b2fc0e85b3a058724dd0"}
    assert meta["annotations"].items() > annotations.items()
    world.cluster.put("jobsets", world.jobset | {"metadata": meta | {"annotations": annotations}})


@stories(
    {
        "once": "ask 1, run, phase Running, jobsets 2, causes Requested -, costs Requested=1/0, rests",
        "not for the same value": "ask 1, run, ask 1, run, restart, run, jobsets 2, rests",
        "not when it is removed": "ask 1, run, ask -, run, ask 1, run, jobsets 2, rests",
        "for another value": "ask 1, run, ask 2, run, phase Running, jobsets 3, causes Requested Requested -",
        "not after a restart of its own": "ask 1, run, fail, run, restart, run, jobsets 2",
        "while the operator is away": "away, ask 1, restart, run, jobsets 2, causes Requested -",
        "and saves first": "stop 1 75, ask 1, run, phase Running, latest 7 120, costs Requested=1/0",
        "not before it is accepted": (
            "edit image none, run, ask 1, run, jobsets 1, causes -, edit image typo, run, jobsets 2"
        ),
        "while its spec can't be read": "edit ttl soon, run, ask 1, run, jobsets 2, rests, fail, run, jobsets 2, rests",
        "and not again once it can": (
            "edit ttl soon, run, ask 1, run, edit ttl later, restart, run, jobsets 2, causes Requested -"
        ),
        "with its own words": "ask 1, run, message Running 2 of 2, asked",
        "at the end of its suspension": (
            "suspend, run, phase Suspended, ask 1, run, phase Suspended, rests, resume, run, phase Running"
        ),
        "never when it is over": "end 0, run, phase Complete, ask 1, run, phase Complete, jobsets 1",
    }
)
async def test_a_job_is_restarted_for_its_annotation(story: str) -> None:
    def asked(world: World) -> None:
        assert world.status.attempts[0].message == "annotation stepkeeper.dev/restart was changed"

    await play(await run_job(restarts={"maxFailures": 1, "maxDisruptions": 0}), story, asked=asked)


async def test_an_annotation_that_a_job_is_made_with_asks_for_nothing() -> None:
    await play(World(), "ask 1, run, phase Running, jobsets 1, causes -, rests")


async def test_the_annotation_ends_a_back_off() -> None:
    world = await run_job(restarts={"backoff": {"initialSeconds": 600, "maxSeconds": 600}})
    await play(world, "fail, run, fail, run, fail, run, phase Restarting")
    assert world.status.next_start_time is not None
    await play(world, "ask 1, run, phase Running")


async def test_the_annotation_starts_a_job_that_made_too_many_starts() -> None:
    world = await run_job(restarts={"maxFailures": 0, "maxStartsWithoutCheckpoint": 1})
    await play(world, "evict, run, phase Suspended, condition Suspended True/NoNewCheckpoint")
    await play(world, "message Suspended stepkeeper.dev/restart, ask 1, run, phase Running, starts 1")


async def test_a_job_without_machines_is_restarted_once_they_are_back() -> None:
    world = world_of(machines())
    await play(world, "run, phase Running")
    (resource,) = world.cluster.list_objects("queuedresources")
    world.cluster.remove("queuedresources", "default", resource["metadata"]["name"])
    await play(world, "run, phase Suspended, ask 1, run, phase Suspended, rests")
    world.cluster.put("queuedresources", machines(uid="uid-a"))
    await play(world, "run, phase Running")


PENDING: Final = "condition PendingChanges True/AtNextStart"
NONE_PENDING: Final = "condition PendingChanges False/AsExpected"


@stories(
    {
        "an interval": f"edit interval 50, run 2, {PENDING}, jobsets 1, causes -, rests, events PendingChanges 1",
        "and another field": f"edit interval 50, look, wait 2, edit steps 7, look, {PENDING}, events PendingChanges 2",
        "until it is taken back": f"edit interval 50, look, wait 2, edit interval 100, look, {NONE_PENDING}, rests",
        "known to another operator": f"edit interval 50, look, restart, rests, edit interval 100, look, {NONE_PENDING}",
        "made while no operator ran": f"away, edit interval 50, restart, run 2, {PENDING}, rests",
        "unread by a start without an operator": (
            f"away, edit interval 50, fail, act, act, restart, run 2, {PENDING}, causes ApplicationError -, rests"
        ),
        "until the next start": f"edit interval 50, look, fail, run, {NONE_PENDING}, phase Running, rests",
        "and its next edit": (
            f"edit interval 50, look, evict, run, edit interval 100, look, {PENDING}, message PendingChanges interval"
        ),
        "until its suspension": f"edit interval 50, look, suspend, run, {NONE_PENDING}, rests, resume, run, rests",
        "until its restart": f"edit interval 50, look, ask 1, run, {NONE_PENDING}, phase Running, rests",
        "until its end": f"edit interval 50, look, end 0, run, phase Complete, {NONE_PENDING}",
        "while the next edit isn't accepted": f"edit interval 50, look, edit image none, run 2, {PENDING}",
        "while the spec can't be read": f"edit interval 50, look, edit ttl soon, run 2, {PENDING}, restart, rests",
        "until a start without the spec": (
            f"edit interval 50, look, edit ttl soon, run 2, fail, run, {NONE_PENDING}, edit ttl later, run, "
            f"{NONE_PENDING}, phase Running, rests"
        ),
    }
)
async def test_an_edit_that_waits_for_the_next_start_is_shown(story: str) -> None:
    await play(await run_job(), story)


async def test_a_pending_edit_is_named_with_the_command_that_restarts_the_job() -> None:
    world = await play(await run_job(), "edit interval 50, look, wait 2, edit steps 7, look")
    assert world.message("PendingChanges") == (
        "the running pods have not read the present spec.checkpoint.interval, spec.totalSteps: they do at the next "
        "start. To save and start again now: kubectl -n default annotate --overwrite ctj lm "
        "stepkeeper.dev/restart=<any new value>"
    )


@stories(
    {
        "what never waits": "edit image new, run, limit maxFailures 7, run, phase Running",
        "what pods read when they start": "suspend, run, edit interval 50, run, resume, run, phase Running",
    }
)
async def test_no_other_edit_is_pending(story: str) -> None:
    world = await play(await run_job(), f"{story}, rests")
    assert world.condition("PendingChanges") is None


async def test_of_hangs_the_limits_wait_for_the_next_start_and_what_follows_does_not() -> None:
    world = await run_job(hang={"action": "Report"})
    world.edit(hang={"action": "Restart", "maxRestarts": 1})
    await play(world, "run 2, rests")
    assert world.condition("PendingChanges") is None
    world.edit(hang={"action": "Restart", "afterSeconds": 60})
    await play(world, f"run 2, {PENDING}, message PendingChanges spec.hang:, rests")


@pytest.mark.parametrize(
    "noted", [True, False], ids=["an earlier attempt", "an operator that knows no hangs"]
)
async def test_no_edit_is_pending_by_settings_of(noted: bool) -> None:
    world = await run_job()
    raw = before = world.cluster.objects["configmaps", "default", "lm-stepkeeper"]
    read = json.loads(raw["data"]["settings.json"])
    del read["hang"]
    if noted:
        note = {"stepkeeper.dev/started-settings": f"7 {json.dumps(read | {'total_steps': 7})}"}
        raw = raw | {"metadata": raw["metadata"] | {"annotations": note}}
    else:
        raw = raw | {"data": raw["data"] | {"settings.json": json.dumps(read)}}
    world.cluster.put("configmaps", raw)
    await play(world, "restart, run 2, rests")
    assert world.condition("PendingChanges") is None
    after = world.cluster.objects["configmaps", "default", "lm-stepkeeper"]
    assert (after["data"], after["metadata"]["annotations"]) == (before["data"], {})


async def test_pods_that_have_not_started_read_the_edit() -> None:
    world = World()
    world.controllers.gone.update({"n1", "n2"})
    await play(world, "run 3, edit interval 50, run 2, phase Starting")
    world.controllers.gone.clear()
    await play(world, "run 3, phase Running, rests")
    assert world.condition("PendingChanges") is None
