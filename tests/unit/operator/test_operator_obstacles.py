"""Test that an accepted job that can't start says so, and what to look at."""

import pytest

from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus, Phase
from stepkeeper_operator.testing import World

CONTAINER = {"name": "trainer", "image": "trainer:1"}


async def test_a_gang_without_pods_says_where_to_look_after_half_a_minute() -> None:
    world = World()
    await world.reconcile()
    world.now += 2
    again_s = await world.reconcile()
    assert world.condition("Running") == (ConditionStatus.FALSE, "Starting")
    assert again_s is not None
    world.now += 30
    await world.reconcile()
    assert world.condition("Running") == (ConditionStatus.FALSE, "NoPods")
    (claim,) = [c for c in world.status.conditions if c.type == "Running"]
    describe = "kubectl -n default describe"
    assert f"{describe} jobset lm; {describe} jobs -l stepkeeper.dev/job-name=lm" in claim.message
    assert world.events.count("NoPods") == 1
    assert await world.record_writes(rounds=3) == []
    await world.run_until_settled(rounds=3)
    assert world.phase() is Phase.RUNNING
    assert world.events.count("NoPods") == 1


@pytest.mark.parametrize(
    "label", ["batch.kubernetes.io/job-name", "jobset.sigs.k8s.io/job-index", "controller-uid"]
)
async def test_a_label_that_job_and_jobset_give_is_refused(label: str) -> None:
    template = {"metadata": {"labels": {label: "x"}}, "spec": {"containers": [CONTAINER]}}
    world = World(template=template)
    await world.run_until_settled(rounds=2)
    assert world.condition("Accepted") == (ConditionStatus.FALSE, "ReservedLabel")
    assert world.jobset is None


async def test_a_field_that_is_not_known_is_named_and_nothing_is_started() -> None:
    checkpoint = {"uri": "gs://bucket/runs/lm", "interval": {"steps": 100}, "every": 5}
    world = World(checkpoint=checkpoint, livelyness={})
    await world.run_until_settled(rounds=2)
    assert world.condition("Accepted") == (ConditionStatus.FALSE, "UnknownField")
    (claim,) = [c for c in world.status.conditions if c.type == "Accepted"]
    assert "spec.livelyness, spec.checkpoint.every: take it out" in claim.message
    assert world.jobset is None
