"""Test whose a cloud resource is: the object's whose uid its label is. Others are taken over by annotation alone."""

from collections.abc import Callable
from typing import Any

import pytest

from fake_cluster.queued_resources import PLACE, check, decide, find, kinds, make_node, make_resource, observe
from fake_cluster.resource_owners import (
    BY_HAND,
    JOINED,
    OTHERS,
    THEIRS,
    adopting,
    beside,
    made,
    owners,
    record_requests,
    run_all,
    tell,
)
from fake_cluster.resource_world import ResourceWorld, active
from stepkeeper_operator.cloud_tpu.cloud import CloudNode
from stepkeeper_operator.cloud_tpu.naming import CLUSTER_LABEL, UID_LABEL
from stepkeeper_operator.facts.queued_resource import read_queued_machines
from stepkeeper_operator.labels import QUEUED_RESOURCE_UID_LABEL
from stepkeeper_operator.queued_resources.decision import CreateCloudResource

FORMER = {
    "stepkeeper-cluster": "cluster-uid",
    "stepkeeper-namespace": "team",
    "stepkeeper-name": "v5e",
    "stepkeeper-uid": "uid-0",
}
SLICES: dict[str, Any] = {"slices": {"count": 2}}


def lose_status(world: ResourceWorld) -> None:
    if world.raw is not None:
        world.cluster.put("queuedresources", {k: v for k, v in world.raw.items() if k != "status"})


@pytest.mark.parametrize(
    ("labels", "blocks"),
    [(FORMER, True), (THEIRS, False), ({}, False)],
    ids=["a previous's", "theirs", "none"],
)
def test_under_a_later_id_a_former_objects_alone_blocks(labels: dict[str, str], *, blocks: bool) -> None:
    decision = decide(make_resource(), observe(made(labels, cloud_id="team-v5e-r2")))
    assert kinds(decision) == ([] if blocks else [CreateCloudResource])
    if blocks:
        assert "stepkeeper.dev/adopt: team-v5e-r2 on" in find(decision, "Accepted").message


@pytest.mark.parametrize("adopt", ["v5e", "team-v5e-r1", "TEAM-V5E", "team-v5e ", "team-v5e,team-v5e-r1"])
@pytest.mark.parametrize("exists", [True, False])
def test_an_annotation_that_names_nothing_there_is_told(adopt: str, *, exists: bool) -> None:
    decision = decide(make_resource(adopt=adopt), observe(*([made()] if exists else [])))
    assert decision.actions == ()
    accepted = find(decision, "Accepted")
    assert (accepted.status, accepted.reason) == ("False", "OwnedByOther" if exists else "NothingToAdopt")
    assert f"names {adopt}" in accepted.message


@pytest.mark.parametrize(
    ("field", "spec"),
    [
        ("image", {"slices": {"image": "x"}}),
        ("accelerator", {"slices": {"topology": "4x4"}}),
        ("slices", SLICES),
        ("tier", {"tier": {"guaranteed": {}}}),
    ],
)
def test_other_machines_than_the_spec_asks_for_are_not_taken_over(field: str, spec: dict[str, Any]) -> None:
    decision = decide(make_resource(adopt="team-v5e", **spec), observe(made(), nodes=[make_node(made())]))
    assert decision.actions == ()
    check(decision, "Accepted", "False/SpecMismatch", f"{field}: the spec has ")


async def retained(preemptions: int, **spec: Any) -> ResourceWorld:
    """Make one, let it be preempted so many times, and delete its object so that the machines stay."""
    world = await active(deletion_policy="Retain", **spec)
    await tell(
        world, ", ".join([*["preempt, run 40"] * preemptions, "delete, run 2, gone, events Retained 1"])
    )
    assert len(world.cloud.resources) == 1
    world.make_object("uid-2", **spec)
    return world


@pytest.mark.parametrize(
    ("whose", "forgets", "spec"),
    [
        ("made by hand", "nothing", SLICES),
        ("made by hand", "its process", {}),
        ("another cluster's", "its status", SLICES),
        ("another cluster's", "its process", SLICES),
        ("retained", "nothing", SLICES),
        ("retained", "its status", {}),
        ("retained, a later one", "its process", SLICES),
    ],
)
async def test_what_the_annotation_names_is_taken_over(
    whose: str, forgets: str, spec: dict[str, Any]
) -> None:
    if whose.startswith("retained"):
        world = await retained(int("later" in whose), **spec)
    else:
        world = ResourceWorld(uid="uid-2", **spec)
        world.cloud.add(made(BY_HAND if whose == "made by hand" else THEIRS, **spec))
    created, ((_, cloud_id),) = list(world.cloud.created), world.cloud.resources
    await tell(world, f"run 2, {OTHERS}, annotate {cloud_id}")
    forget = {"nothing": "", "its process": ", restart", "its status": ", lose-status"}[forgets]
    await tell(world, ", ".join([f"run 2{forget}"] * 6), **{"lose-status": lose_status})
    await tell(world, f"run 4, state Active, condition Accepted True/Accepted, {JOINED}")
    assert world.cloud.created == created
    assert world.status.cloud_name.endswith(f"/{cloud_id}")
    assert world.events.count("Adopted") == 1 or forgets == "its status"
    labels = [node.labels for node in world.cloud.nodes.values()]
    assert {(each[UID_LABEL], each[CLUSTER_LABEL]) for each in labels} == {("uid-2", "cluster-uid")}
    assert whose != "made by hand" or all(each.get("team") == "blue" for each in labels)
    hosts = world.cluster.list_objects("nodes")
    assert {host["metadata"]["labels"][QUEUED_RESOURCE_UID_LABEL] for host in hosts} == {"uid-2"}
    await tell(world, "rests, delete, run 20, nothing-left")


@pytest.mark.parametrize("before", [True, False], ids=["not carried out", "carried out"])
@pytest.mark.parametrize("then", ["stays", "is deleted"])
@pytest.mark.parametrize("kill_at", range(8))
async def test_an_operator_that_is_killed_at_any_write_forgets_no_machine(
    kill_at: int, then: str, *, before: bool
) -> None:
    world = beside(**SLICES)
    world.kill_at, world.kill_before = kill_at, before
    for _ in range(60):
        if world.kill_at is None:
            break
        await world.reconcile()
        if then == "stays":
            world.step()
    if then == "stays":
        await world.run(20)
        assert world.status.operator.adopted
        assert world.cloud.created == []
    labelled = "uid-1" in owners(world)
    world.delete()
    await world.run(20)
    assert world.raw is None
    assert not world.cloud.resources or not labelled


async def test_the_annotation_is_harmless_afterwards() -> None:
    world = await tell(await adopting(FORMER), "suspend")
    world.cloud.nodes.clear()
    await tell(world, f"run 40, created team-v5e-r1, {JOINED}")
    world.cloud.add(made())
    await tell(world, "annotate team-v5e, run 8, ours team-v5e-r1")
    assert world.cloud.nodes[PLACE, "team-v5e"].labels == BY_HAND


@pytest.mark.parametrize("state", ["WAITING_FOR_RESOURCES", "FAILED", "SUSPENDED"])
@pytest.mark.parametrize("deletes", [False, True])
async def test_what_has_no_nodes_is_adopted_once_it_has(state: str, *, deletes: bool) -> None:
    world = ResourceWorld(adopt="team-v5e")
    world.cloud.set_capacity("v5litepod", 0)
    world.cloud.resources[PLACE, "team-v5e"] = made(state=state)
    await tell(world, f"run 1, condition Accepted Unknown/Adopting, message Accepted {state}")
    assert world.raw is not None
    assert read_queued_machines(world.raw).obstacle == world.message("Accepted")
    world.cloud.set_capacity("v5litepod", None)
    await tell(world, "delete, run 25, gone, created" if deletes else "run 25, created")
    if deletes:
        assert world.cloud.resources[PLACE, "team-v5e"].state != "DELETING"
    elif state == "WAITING_FOR_RESOURCES":
        await tell(world, "state Active")
        assert world.status.operator.adopted


async def test_what_is_on_its_way_out_is_not_adopted() -> None:
    world = beside()
    world.cloud.resources[PLACE, "team-v5e"] = made(state="DELETING")
    asked = record_requests(world)
    await tell(world, "stay, run 4, condition Accepted Unknown/Adopting")
    assert asked == []


async def test_a_refusal_to_write_labels_is_told_in_the_clouds_words() -> None:
    world = await tell(
        beside(), "fail UpdateNode PERMISSION_DENIED 1, run 4, condition Accepted False/Refused"
    )
    await tell(world, "message Accepted in its words, run 40 100")
    assert world.status.operator.adopted
    assert world.status.error is None


async def label(world: ResourceWorld) -> None:
    """Reconcile until the label is written, and restart the operator right then."""
    for _ in range(30):
        await world.reconcile()
        world.now += 1
        if any(UID_LABEL in node.labels for node in world.cloud.nodes.values()):
            break
    world.restart_operator()
    assert world.status.operator.adopting


async def adopt_and_lose_status(world: ResourceWorld) -> None:
    await world.run(6)
    assert world.status.operator.adopted
    lose_status(world)
    world.restart_operator()


async def label_and_change_mind(world: ResourceWorld) -> None:
    await label(world)
    world.annotate(None)


@pytest.mark.parametrize(
    ("before", "cloud_id", "looks", "unlisted"),
    [
        (adopt_and_lose_status, "team-v5e", 0, True),
        (label, "team-v5e", 0, False),
        (label_and_change_mind, "team-v5e", 0, False),
        (label_and_change_mind, "team-v5e-r3", 1, True),
    ],
)
async def test_what_carries_our_label_is_deleted_with_the_object_whatever_lists_leave_out(
    before: Callable[[ResourceWorld], Any], cloud_id: str, looks: int, *, unlisted: bool
) -> None:
    async def list_nothing(*_: Any) -> tuple[CloudNode, ...]:
        return ()

    world = beside(cloud_id)
    world.sync_hosts = lambda *_: None  # type: ignore[method-assign]
    await before(world)
    world.cloud.list_nodes = list_nothing  # type: ignore[assignment, method-assign]
    for _ in range(looks):
        await world.reconcile()
    if unlisted:
        world.cloud.unlisted = {cloud_id}
    asked = record_requests(world)
    world.delete()
    await run_all(16, world)
    assert asked == [f"delete {cloud_id}"]
    assert world.raw is None
