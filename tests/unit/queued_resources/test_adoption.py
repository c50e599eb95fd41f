"""Test whose a cloud resource is: the object's whose uid its label is. Others are taken over by annotation alone."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from fake_cluster.queued_resources import (
    PLACE,
    decide,
    deleting,
    find,
    kinds,
    make_cloud_resource,
    make_node,
    make_resource,
    noted,
    observe,
)
from fake_cluster.resource_world import ResourceWorld, active
from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceState
from stepkeeper_operator.cloud_tpu.cloud import CloudNode, CloudQueuedResource
from stepkeeper_operator.facts.queued_resource import read_queued_machines
from stepkeeper_operator.labels import QUEUED_RESOURCE_UID_LABEL
from stepkeeper_operator.queued_resources.decision import CreateCloudResource, DeleteCloudResource
from stepkeeper_operator.queued_resources.naming import CLUSTER_LABEL, UID_LABEL
from stepkeeper_operator.queued_resources.settings import CloudSettings

THEIRS = {
    "stepkeeper-cluster": "another",
    "stepkeeper-namespace": "x",
    "stepkeeper-name": "y",
    "stepkeeper-uid": "z",
}
FORMER = {
    "stepkeeper-cluster": "cluster-uid",
    "stepkeeper-namespace": "team",
    "stepkeeper-name": "v5e",
    "stepkeeper-uid": "uid-0",
}
BY_HAND = {"team": "blue"}
SLICES: dict[str, Any] = {"node": {"count": 2}}


def made(
    labels: Mapping[str, str] = BY_HAND, state: str = "ACTIVE", cloud_id: str = "team-v5e", **spec: Any
) -> CloudQueuedResource:
    """Make a cloud resource that isn't the object's."""
    asked = make_cloud_resource(make_resource(**spec), state)
    node = {key: value for key, value in asked.node.items() if key != "metadata"}
    node_ids = tuple(name.replace("team-v5e", cloud_id) for name in asked.node_ids)
    return replace(asked, id=cloud_id, node_ids=node_ids, node={**node, "labels": dict(labels)})


def beside(cloud_id: str = "team-v5e", labels: Mapping[str, str] = BY_HAND, **options: Any) -> ResourceWorld:
    """Make a world whose object names what is there by hand."""
    world = ResourceWorld(adopt=cloud_id, **options)
    spec = {"node": options["node"]} if "node" in options else {}
    world.cloud.add(made(labels, cloud_id=cloud_id, **spec))
    return world


async def adopting(labels: Mapping[str, str] = BY_HAND, **options: Any) -> ResourceWorld:
    world = beside(labels=labels, **options)
    await world.run(8)
    assert world.status.bookkeeping.adopted
    assert world.condition("Accepted") == ("True", "Accepted")
    return world


async def run_all(rounds: int, *worlds: ResourceWorld) -> None:
    """Let the operators of several clusters act in turn."""
    for _ in range(rounds):
        for world in worlds:
            await world.reconcile()
            await world.reconcile()
        worlds[0].step()
        for world in worlds[1:]:
            world.now = worlds[0].now


def record_requests(world: ResourceWorld) -> list[str]:
    asked: list[str] = []
    world.cloud.on_request = lambda verb, cloud_id: asked.append(f"{verb} {cloud_id}")
    return asked


def owners(world: ResourceWorld) -> set[str | None]:
    return {node.labels.get(UID_LABEL) for node in world.cloud.nodes.values()}


def take_nodes(world: ResourceWorld) -> None:
    """Label the nodes as another cluster would that adopts it."""
    for key, node in world.cloud.nodes.items():
        world.cloud.nodes[key] = replace(node, labels=THEIRS)


def take_name(world: ResourceWorld) -> None:
    """Delete it and make another one of that name, as another cluster would."""
    for key, found in world.cloud.resources.items():
        node = {**found.node, "labels": THEIRS}
        world.cloud.resources[key] = replace(found, create_time=5000, node=node)
    take_nodes(world)


def lose_status(world: ResourceWorld) -> None:
    if world.raw is not None:
        world.cluster.put("queuedresources", {k: v for k, v in world.raw.items() if k != "status"})


@pytest.mark.parametrize(
    ("labels", "blocks"), [(FORMER, True), (THEIRS, False), ({}, False)], ids=["a former's", "theirs", "none"]
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
    assert (accepted.status, accepted.reason) == ("False", "NotOurs" if exists else "NothingToAdopt")
    assert f"names {adopt}" in accepted.message


@pytest.mark.parametrize(
    ("field", "spec"),
    [
        ("runtime_version", {"node": {"runtimeVersion": "x"}}),
        ("accelerator_type", {"node": {"acceleratorType": "v5litepod-16"}}),
        ("nodes", SLICES),
        ("tier", {"tier": {"guaranteed": {}}}),
    ],
)
async def test_other_machines_than_the_spec_asks_for_are_not_taken_over(
    field: str, spec: dict[str, Any]
) -> None:
    world = ResourceWorld(adopt="team-v5e", **spec)
    world.cloud.add(made())
    await world.run(4)
    assert world.condition("Accepted") == ("False", "Differs")
    assert f"{field}: asked for " in world.message("Accepted")
    assert owners(world) == {None}


async def retained(preemptions: int, **spec: Any) -> ResourceWorld:
    """Make one, let it be preempted so many times, and delete its object so that the machines stay."""
    world = await active(deletion_policy="Retain", **spec)
    for _ in range(preemptions):
        world.cloud.set_nodes("PREEMPTED")
        await world.run(40)
    world.delete()
    await world.run(2)
    assert world.raw is None
    assert "Retained" in world.events
    assert len(world.cloud.resources) == 1
    world.make_object("uid-2", **spec)
    return world


@pytest.mark.parametrize(
    ("whose", "forgets", "spec"),
    [
        ("nobody's", "nothing", SLICES),
        ("nobody's", "its process", {}),
        ("another cluster's", "its status", SLICES),
        ("another cluster's", "its process", SLICES),
        ("retained", "nothing", SLICES),
        ("retained", "its status", {}),
        ("retained, a later one", "nothing", {}),
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
        world.cloud.add(made(BY_HAND if whose == "nobody's" else THEIRS, **spec))
    created, ((_, cloud_id),) = list(world.cloud.created), world.cloud.resources
    await world.run(2)
    assert world.condition("Accepted") == ("False", "NotOurs")
    world.annotate(cloud_id)
    for _ in range(6):
        await world.run(2)
        if forgets == "its process":
            world.restart_operator()
        if forgets == "its status":
            lose_status(world)
    await world.run(4)
    assert world.cloud.created == created
    assert world.status.state is QueuedResourceState.ACTIVE
    assert world.status.cloud_name.endswith(f"/{cloud_id}")
    assert world.condition("Accepted") == ("True", "Accepted")
    assert world.condition("NodesJoined") == ("True", "AllHostsJoined")
    assert world.events.count("Adopted") == 1 or forgets == "its status"
    labels = [node.labels for node in world.cloud.nodes.values()]
    assert {(each[UID_LABEL], each[CLUSTER_LABEL]) for each in labels} == {("uid-2", "cluster-uid")}
    assert whose != "nobody's" or all(each.get("team") == "blue" for each in labels)
    hosts = world.cluster.list_objects("nodes")
    assert {host["metadata"]["labels"][QUEUED_RESOURCE_UID_LABEL] for host in hosts} == {"uid-2"}
    assert await world.record_writes() == []
    world.delete()
    await world.run(20)
    assert world.raw is None
    assert not world.cloud.resources
    assert not world.hosts


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
        assert world.status.bookkeeping.adopted
        assert world.cloud.created == []
    labelled = "uid-1" in owners(world)
    world.delete()
    await world.run(20)
    assert world.raw is None
    assert not world.cloud.resources or not labelled


async def test_the_annotation_is_harmless_afterwards() -> None:
    world = await adopting(FORMER)
    world.cloud.suspend("team-v5e")
    world.cloud.nodes.clear()
    await world.run(40)
    assert world.cloud.created == ["team-v5e-r1"]
    assert world.condition("NodesJoined") == ("True", "AllHostsJoined")
    world.cloud.add(made())
    world.annotate("team-v5e")
    await world.run(8)
    assert world.ours == ["team-v5e-r1"]
    assert world.cloud.nodes[PLACE, "team-v5e"].labels == BY_HAND


@pytest.mark.parametrize("adopted", [True, False], ids=["adopted", "made"])
@pytest.mark.parametrize("deleted", [True, False], ids=["and deleted", "and kept"])
async def test_what_somebody_else_takes_over_is_let_go_untouched(*, deleted: bool, adopted: bool) -> None:
    world = await adopting() if adopted else ResourceWorld()
    await world.run(14)
    requests = record_requests(world)
    take_nodes(world)
    if deleted:
        world.delete()
    await world.run(20)
    assert requests == []
    assert owners(world) == {"z"}
    assert world.events.count("LetGo") == 1
    if deleted:
        assert world.raw is None
        return
    assert world.condition("Accepted") == ("False", "NotOurs")
    world.annotate(None)
    await world.run(4)
    world.annotate("team-v5e")
    await world.run(8)
    assert owners(world) == {"uid-1"}
    assert world.condition("Accepted") == ("True", "Accepted")


@pytest.mark.parametrize("state", ["WAITING_FOR_RESOURCES", "FAILED", "SUSPENDED"])
@pytest.mark.parametrize("deletes", [False, True])
async def test_what_has_no_nodes_is_adopted_once_it_has(state: str, *, deletes: bool) -> None:
    world = ResourceWorld(adopt="team-v5e")
    world.cloud.set_capacity("v5litepod", 0)
    world.cloud.resources[PLACE, "team-v5e"] = made(state=state)
    await world.run(1)
    assert world.condition("Accepted") == ("Unknown", "Adopting")
    assert world.raw is not None
    assert read_queued_machines(world.raw).obstacle == world.message("Accepted")
    assert state in world.message("Accepted")
    world.cloud.set_capacity("v5litepod", None)
    if deletes:
        world.delete()
    await world.run(25)
    assert world.cloud.created == []
    if deletes:
        assert world.raw is None
        assert world.cloud.resources[PLACE, "team-v5e"].state != "DELETING"
    elif state == "WAITING_FOR_RESOURCES":
        assert world.status.state is QueuedResourceState.ACTIVE
        assert world.status.bookkeeping.adopted


async def test_what_is_on_its_way_out_is_not_adopted() -> None:
    world = beside()
    world.cloud.resources[PLACE, "team-v5e"] = made(state="DELETING")
    world.cloud.stays.add("team-v5e")
    asked = record_requests(world)
    await world.run(4)
    assert asked == []
    assert world.condition("Accepted") == ("Unknown", "Adopting")


async def test_a_refusal_to_write_labels_is_told_in_the_clouds_words() -> None:
    world = beside()
    world.cloud.inject_error("UpdateNode", "PERMISSION_DENIED", message="no tpu.nodes.update")
    await world.run(4)
    assert world.condition("Accepted") == ("False", "Refused")
    assert "no tpu.nodes.update" in world.message("Accepted")
    await world.run(40, seconds=100)
    assert world.status.bookkeeping.adopted
    assert world.status.error is None


async def label(world: ResourceWorld) -> None:
    """Reconcile until the label is written, and restart the operator right then."""
    for _ in range(30):
        await world.reconcile()
        world.now += 1
        if any(UID_LABEL in node.labels for node in world.cloud.nodes.values()):
            break
    world.restart_operator()
    assert world.status.bookkeeping.adopting


async def adopt_and_lose_status(world: ResourceWorld) -> None:
    await world.run(6)
    assert world.status.bookkeeping.adopted
    lose_status(world)
    world.restart_operator()


async def label_and_change_mind(world: ResourceWorld) -> None:
    await label(world)
    world.annotate(None)


async def label_after_a_refused_creation(world: ResourceWorld) -> None:
    world.annotate(None)
    world.cloud.unlisted = {"team-v5e"}
    await world.run(2)
    assert world.status.error is not None
    assert world.status.error.code == "ALREADY_EXISTS"
    world.cloud.unlisted = set()
    world.now += 60
    world.annotate("team-v5e")
    await label(world)


@pytest.mark.parametrize(
    ("before", "cloud_id", "looks", "unlisted"),
    [
        (adopt_and_lose_status, "team-v5e", 0, True),
        (adopt_and_lose_status, "team-v5e-r3", 0, False),
        (label, "team-v5e", 0, False),
        (label, "team-v5e-r3", 0, True),
        (label_and_change_mind, "team-v5e", 0, False),
        (label_and_change_mind, "team-v5e-r3", 1, True),
        (label_after_a_refused_creation, "team-v5e", 0, False),
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


@pytest.mark.parametrize("adopted", [True, False])
@pytest.mark.parametrize("take", [take_nodes, take_name])
@pytest.mark.parametrize("by", ["its own deletion", "a change of its spec"])
async def test_what_another_cluster_has_taken_since_the_last_list_is_not_deleted(
    by: str, take: Callable[[ResourceWorld], None], *, adopted: bool
) -> None:
    options: dict[str, Any] = {"settings": CloudSettings(poll_active_s=60), "update_policy": "Recreate"}
    world = beside(**options) if adopted else ResourceWorld(**options)
    world.sync_hosts = lambda *_: None  # type: ignore[method-assign]
    await world.run(40)
    await world.reconcile()
    assert world.status.bookkeeping.adopted is adopted
    asked = record_requests(world)
    take(world)
    theirs = dict(world.cloud.resources)
    if by == "its own deletion":
        world.delete()
    else:
        world.edit(node={**world.resource.to_raw()["spec"]["node"], "acceleratorType": "v5litepod-4"})
    await world.run(12)
    assert not [each for each in asked if each.startswith("delete")]
    assert theirs.items() <= world.cloud.resources.items()
    assert "LetGo" in world.events or not adopted
    assert (world.raw is None) is (by == "its own deletion")
    if world.raw is not None:
        assert world.status.error is None


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("deleted", ["never", "while it has nodes", "afterwards"])
async def test_the_former_owner_neither_takes_back_nor_replaces_what_another_cluster_has_adopted(
    number: int, deleted: str
) -> None:
    first = await active(recreatePolicy={"backoff": {"initialSeconds": 0}})
    if number:
        first.cloud.suspend("team-v5e")
        await first.run(14)
    cloud_id = f"team-v5e-r{number}" if number else "team-v5e"
    kept = {"onSuspended": "Keep", "onFailed": "Keep"}
    second = ResourceWorld(
        uid="uid-2", cluster_id="another", service=first.cloud, now=first.now, recreatePolicy=kept
    )
    second.annotate(cloud_id)
    await run_all(8, first, second)
    assert second.status.bookkeeping.adopted
    assert "LetGo" in first.events
    asked = record_requests(first)
    hosts = first.hosts
    assert hosts
    if deleted == "while it has nodes":
        first.delete()
    await run_all(8, first, second)
    assert first.hosts == hosts
    first.cloud.suspend(cloud_id)
    first.cloud.nodes.clear()
    if deleted == "afterwards":
        first.delete()
    await run_all(8, first, second)
    assert asked == []
    assert second.status.state is QueuedResourceState.SUSPENDED
    assert (first.raw is None) is (deleted != "never")
    if deleted == "never":
        assert first.condition("Accepted") == ("False", "NotOurs")
        first.sync_hosts([])
        second.delete()
        await run_all(20, first, second)
        assert asked[:2] == [f"delete {cloud_id}", f"create {cloud_id}"]


def test_a_loss_is_no_reason_to_forget_another_one_of_ours() -> None:
    resource = deleting(QueuedResourceState.ACTIVE)
    lost = make_cloud_resource(resource, "ACTIVE")
    stray = make_cloud_resource(noted(resource, number=1), "ACTIVE")
    decision = decide(
        resource, observe(lost, stray, nodes=[make_node(lost, labels=THEIRS), make_node(stray)])
    )
    (action,) = decision.actions
    assert isinstance(action, DeleteCloudResource)
    assert action.cloud_id == stray.id
    assert [event.reason for event in decision.events if event.reason == "LetGo"] == ["LetGo"]


async def test_what_belongs_to_another_object_of_this_cluster_is_not_adopted_before_it_is_let_go() -> None:
    owner = ResourceWorld(namespace="team", name="v5-e")
    await owner.run(6)
    other = ResourceWorld(
        namespace="team-v5", name="e", uid="uid-2", service=owner.cloud, now=owner.now, adopt="team-v5-e"
    )
    assert owner.raw is not None
    other.cluster.put("queuedresources", owner.raw)
    asked = record_requests(owner)
    await run_all(6, owner, other)
    assert asked == []
    assert other.condition("Accepted") == ("False", "NotOurs")
    assert any("belongs to QueuedResource team/v5-e of" in each.message for each in other.status.conditions)
    owner.edit(deletionPolicy="Retain")
    owner.delete()
    await run_all(2, owner)
    other.cluster.remove("queuedresources", "team", "v5-e")
    await run_all(8, owner, other)
    assert other.status.bookkeeping.adopted
