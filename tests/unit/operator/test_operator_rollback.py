"""Test jobs whose specs have what only a newer operator knows, as after a rollback beside newer CRDs."""

from typing import Any

import pytest

from fake_cluster.facts import make_job
from fake_cluster.world import World
from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus, Phase
from stepkeeper_operator.api.v1alpha1.trainingjob_status import Bookkeeping
from stepkeeper_operator.observed import Observed
from stepkeeper_operator.policy.starts import was_edited

REFUSED = (ConditionStatus.FALSE, "UnreadableSpec")
RING: dict[str, Any] = {"placement": {"hosts": {"count": 2, "shape": "ring"}}}
UNKNOWN_CHOICES: dict[str, dict[str, Any]] = {
    "placement.gpu": {"placement": {"gpu": {"count": 2}}},
    "interval.minutes": {"checkpoint": {"uri": "gs://bucket/lm", "interval": {"minutes": 5}}},
}


def change(world: World, **spec: Any) -> None:
    raw = world.cluster.objects["checkpointedtrainingjobs", "default", "lm"]
    world.cluster.put("checkpointedtrainingjobs", raw | {"spec": raw["spec"] | spec})


def message(world: World) -> str:
    return next(c.message for c in world.status.conditions if c.type == "Accepted")


def uids(world: World) -> list[str]:
    return [pod["metadata"]["uid"] for pod in world.pods]


def make_hash_newer(world: World) -> None:
    """Give the JobSet the hash of an operator that knows more of the placement than this one."""
    assert world.jobset is not None
    meta = world.jobset["metadata"]
    annotations = meta["annotations"] | {"stepkeeper.dev/template-hash": "of a newer operator"}
    world.cluster.put("jobsets", world.jobset | {"metadata": meta | {"annotations": annotations}})


@pytest.mark.parametrize("spec", UNKNOWN_CHOICES.values(), ids=UNKNOWN_CHOICES)
async def test_a_choice_that_is_not_known_leaves_what_runs_alone(spec: dict[str, Any]) -> None:
    world = World()
    await world.run_until_settled()
    pods = uids(world)
    assert len(pods) == 2
    change(world, **spec)
    world.restart_operator()
    await world.run_until_settled(rounds=20)
    assert world.condition("Accepted") == REFUSED
    assert world.phase() is Phase.RUNNING
    assert uids(world) == pods
    assert await world.record_writes(rounds=3) == []


@pytest.mark.parametrize("spec", UNKNOWN_CHOICES.values(), ids=UNKNOWN_CHOICES)
async def test_a_choice_that_is_not_known_starts_nothing(spec: dict[str, Any]) -> None:
    world = World()
    change(world, **spec)
    await world.run_until_settled()
    assert world.condition("Accepted") == REFUSED
    assert world.jobset is None


async def test_the_condition_names_the_choice_and_what_to_do() -> None:
    world = World()
    change(world, placement={"gpu": {"count": 2}})
    await world.run_until_settled()
    assert message(world) == (
        "this operator can't read spec.placement: none of tpu, hosts is given, and this operator doesn't know gpu."
        " Correct it, or upgrade the operator; running pods are not affected"
    )


async def test_a_hash_of_a_newer_operator_restarts_nothing() -> None:
    world = World()
    await world.run_until_settled()
    pods = uids(world)
    make_hash_newer(world)
    change(world, **RING)
    world.restart_operator()
    await world.run_until_settled()
    assert uids(world) == pods
    assert world.condition("Accepted") == (ConditionStatus.TRUE, "UnknownFields")
    assert message(world).endswith("Until then it applies no change of spec.placement, spec.template")


async def test_an_edit_takes_effect_once_all_fields_are_known() -> None:
    world = World(**RING)
    await world.run_until_settled()
    pods = uids(world)
    change(world, placement={"hosts": {"count": 3, "shape": "ring"}})
    await world.run_until_settled()
    assert uids(world) == pods
    change(world, placement={"hosts": {"count": 3}})
    await world.run_until_settled(rounds=20)
    assert len(world.pods) == 3


async def test_fields_that_are_in_no_hash_hide_no_edit() -> None:
    world = World(futureLimit=5)
    await world.run_until_settled()
    assert "applies no change" not in message(world)
    change(world, placement={"hosts": {"count": 3}})
    await world.run_until_settled(rounds=20)
    assert len(world.pods) == 3


def test_a_hash_of_a_newer_operator_is_no_edit_that_counts_starts_anew() -> None:
    known = Bookkeeping(started_template="of a newer operator")
    assert was_edited(make_job(), Observed(), known)
    assert not was_edited(make_job(**RING), Observed(), known)
