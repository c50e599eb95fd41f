"""Test which jobs are accepted, and that unknown fields do not affect running pods."""

from typing import Any, Final

import pytest

from fake_cluster.facts import make_job, make_jobset
from fake_cluster.stories import play, run_job, table
from fake_cluster.world import World, training_job
from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus, Phase
from stepkeeper_operator.facts.checkpoint_root import read_job_root
from stepkeeper_operator.facts.jobset import ConfigMap
from stepkeeper_operator.facts.raw import render_time
from stepkeeper_operator.training_jobs.decide.acceptance import NAME_TAKEN, check_acceptance
from stepkeeper_operator.training_jobs.observed import Observed

TRAINER: Final[dict[str, Any]] = {"name": "trainer", "image": "trainer:1"}


def template(*containers: dict[str, Any], label: str = "mine") -> dict[str, Any]:
    return {"template": {"metadata": {"labels": {label: "1"}}, "spec": {"containers": list(containers)}}}


def with_env(name: str) -> dict[str, Any]:
    return template(TRAINER | {"env": [{"name": name, "value": "1"}]})


FOREIGN: Final = ConfigMap(owner_uid="another", owner_job=None, data={})
OWN: Final = ConfigMap(owner_uid="j", owner_job="lm", data={})


@pytest.mark.parametrize(
    ("spec", "observed", "reason"),
    [
        ({}, {}, "SpecAccepted"),
        ({}, {"jobset": make_jobset(), "config_map": OWN}, "SpecAccepted"),
        ({"livelyness": {}}, {}, "UnknownFields"),
        (template(TRAINER), {}, "SpecAccepted"),
        *(
            (template(TRAINER, label=label), {}, "ReservedLabel")
            for label in ("batch.kubernetes.io/x", "jobset.sigs.k8s.io/x", "job-name", "controller-uid")
        ),
        (template({"name": "other", "image": "i"}), {}, "NoTrainer"),
        (template(TRAINER, TRAINER), {}, "NoTrainer"),
        (with_env("STEPKEEPER_JOB_UID"), {}, "ReservedVariable"),
        (with_env("MINE"), {}, "SpecAccepted"),
        ({}, {"jobset": make_jobset(owner_uid="another")}, "JobSetNameTaken"),
        ({}, {"config_map": FOREIGN}, "ConfigMapNameTaken"),
        ({}, {"unreadable": ("spec.x: no",)}, "UnreadableSpec"),
    ],
)
def test_a_spec_is_accepted_or_its_problem_is_named(
    spec: dict[str, Any], observed: dict[str, Any], reason: str
) -> None:
    found = check_acceptance(make_job(**spec), Observed(**observed))
    assert found.reason == reason
    assert found.status is (reason in {"SpecAccepted", "UnknownFields"})
    assert (reason in NAME_TAKEN) is reason.endswith("Taken")


URI: Final = "gs://bucket/runs/lm"
"""That of the world's job."""

IN_USE: Final = (ConditionStatus.FALSE, "RootInUse")
FIRST: Final = ("checkpointedtrainingjobs", "team", "first")


def other_job(
    world: World, *, age_s: float = 60, uri: str = URI, suspend: bool = False, **status: Any
) -> None:
    """Make another job that is older than the world's by so many seconds."""
    raw = training_job(checkpoint={"uri": uri, "interval": {"every": {"steps": 100}}}, suspend=suspend)
    created_at = world.job.metadata.creation_timestamp
    assert created_at is not None
    meta = {"name": "first", "namespace": "team", "uid": "first"}
    meta |= {"creationTimestamp": render_time(created_at - age_s)}
    world.cluster.put(FIRST[0], raw | {"metadata": meta, "status": status})


@pytest.mark.parametrize("uri", [URI, "gs://bucket/runs", "gs://bucket", f"{URI}/child"])
async def test_the_younger_of_two_jobs_in_one_root_is_refused_with_the_name_of_the_older(uri: str) -> None:
    world = World()
    other_job(world, uri=uri)
    await world.run_until_settled(rounds=4)
    assert world.condition("Accepted") == IN_USE
    assert "job team/first keeps its checkpoints in " + uri in world.message("Accepted")
    assert world.events.count("RootInUse") == 1
    assert (world.jobset, world.status.attempts) == (None, ())
    assert (await world.reconcile() or 99) <= 30, "it looks again by itself"
    assert await world.record_writes(rounds=3) == []
    world.cluster.remove(*FIRST)
    await world.run_until_settled()
    assert world.phase() is Phase.RUNNING


OVER: Final = {"type": "Finished", "status": "True", "lastTransitionTime": "2027-01-01T00:00:00Z"}
BEGUN: Final = {"number": 1, "start": "2027-01-01T00:00:00Z"}
OTHERS: Final[dict[str, tuple[dict[str, Any], bool]]] = {
    "is younger": ({"age_s": -60}, True),
    "has another bucket": ({"uri": "gs://other/runs/lm"}, True),
    "has a sibling folder": ({"uri": "gs://bucket/runs/lm2"}, True),
    "is over": ({"conditions": [OVER]}, True),
    "is suspended and has no pods": ({"suspend": True, "phase": "Suspended"}, True),
    "is suspended and has pods": ({"suspend": True, "phase": "Suspending"}, False),
    "is younger and has begun": ({"age_s": -60, "attempts": [BEGUN]}, False),
}


@pytest.mark.parametrize(("other", "runs"), OTHERS.values(), ids=OTHERS)
async def test_a_job_runs_or_is_refused_beside_one_that(other: dict[str, Any], *, runs: bool) -> None:
    world = World()
    other_job(world, **other)
    await world.run_until_settled(rounds=4)
    assert (world.phase() is Phase.RUNNING) is runs
    assert (world.condition("Accepted") == IN_USE) is not runs


async def test_a_job_that_has_begun_goes_on_beside_an_older_one_in_its_root() -> None:
    world = await run_job()
    other_job(world)
    await play(world, "fail, run, condition Accepted True/SpecAccepted, causes ApplicationError -")


CLAIM: Final = {"persistentVolumeClaim": {"claimName": "runs"}}
AT_CLAIM: Final = ("claim", "default", "runs", "lm")
DATA: Final = "file:///data/lm"


@table(
    "source, uri, mount, place",
    {
        "claim": (CLAIM, DATA, {}, AT_CLAIM),
        "subPath": (CLAIM, DATA, {"subPath": "a"}, ("claim", "default", "runs", "a", "lm")),
        "host": ({"hostPath": {"path": "/mnt/"}}, DATA, {}, ("host", "mnt", "lm")),
        "nfs": ({"nfs": {"server": "10.0.0.2", "path": "/x"}}, DATA, {}, ("nfs", "10.0.0.2", "x", "lm")),
        "a pod's own": ({"emptyDir": {}}, DATA, {}, None),
        "subPathExpr": (CLAIM, DATA, {"subPathExpr": "$(POD)"}, None),
        "no volume": (CLAIM, "file:///elsewhere/lm", {}, None),
        "a path in curves": (CLAIM, "file:///data/../data/lm", {}, AT_CLAIM),
        "no uri of ours": (CLAIM, "s3://b/lm", {}, None),
        "no uri at all": (CLAIM, "gs://[b", {}, None),
    },
)
def test_a_file_root_is_known_by_its_volume_and_folder(
    source: dict[str, Any], uri: str, mount: dict[str, Any], place: tuple[str, ...] | None
) -> None:
    container = TRAINER | {"volumeMounts": [{"name": "v", "mountPath": "/data", **mount}]}
    pods = {"spec": {"containers": [container], "volumes": [{"name": "v", **source}]}}
    raw = training_job(template=pods, checkpoint={"uri": uri, "interval": {"every": {"steps": 1}}})
    found = read_job_root(raw | {"metadata": raw["metadata"] | {"uid": "u"}})
    assert (None if found is None else found.place) == place


@pytest.mark.parametrize(
    "spec", [None, "x", {}, {"checkpoint": 3}, {"checkpoint": {"uri": "file:///a"}, "template": []}]
)
def test_a_spec_that_can_not_be_read_has_no_root(spec: object) -> None:
    assert read_job_root({"metadata": {"namespace": "a", "name": "b", "uid": "c"}, "spec": spec}) is None


def uids(world: World) -> list[str]:
    return [pod["metadata"]["uid"] for pod in world.pods]


@pytest.mark.parametrize("runs", [True, False])
@table(
    "field, spec",
    {
        "a placement": ("placement", {"gpu": {"count": 2}}),
        "an interval": ("checkpoint", {"uri": "gs://bucket/lm", "interval": {"minutes": 5}}),
    },
)
async def test_a_choice_that_is_not_known_leaves_what_runs_alone_and_starts_nothing(
    field: str, spec: dict[str, Any], *, runs: bool
) -> None:
    world = await run_job() if runs else World()
    before = uids(world)
    world.edit(**{field: spec})
    await play(world, "restart, run, condition Accepted False/UnreadableSpec, rests")
    restarts = "the job restarts with the settings" if runs else "nothing new starts: no settings"
    for words in (f"spec.{field}", "upgrade the operator", "running pods are not affected", restarts):
        assert words in world.message("Accepted")
    assert uids(world) == before


def change_hosts(world: World, count: str) -> None:
    world.edit(placement={"hosts": {"count": int(count)}})


async def test_a_hash_of_a_newer_operator_restarts_nothing_and_an_edit_counts_once_all_fields_are_known() -> (
    None
):
    world = await run_job()
    pods = uids(world)
    assert world.jobset is not None
    meta = world.jobset["metadata"]
    annotations = meta["annotations"] | {"stepkeeper.dev/template-hash": "of a newer operator"}
    world.cluster.put("jobsets", world.jobset | {"metadata": meta | {"annotations": annotations}})
    for count in (2, 3):
        world.edit(placement={"hosts": {"count": count, "shape": "ring"}})
        await play(world, "restart, run, condition Accepted True/UnknownFields")
        assert uids(world) == pods
        assert world.message("Accepted").endswith("it applies no change of spec.placement, spec.template")
    await play(world, "hosts 3, run 20, pods 3", hosts=change_hosts)


async def test_fields_that_are_in_no_hash_hide_no_edit() -> None:
    world = await run_job(futureLimit=5)
    assert "applies no change" not in world.message("Accepted")
    await play(world, "hosts 3, run 20, pods 3", hosts=change_hosts)
