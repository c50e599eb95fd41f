"""The fake Cloud TPU API in random stories: time has no seams, and what is promised about states always holds."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tpuapi.core.errors import ApiError
from tpuapi.core.values import Json, Maintenance, NodeState, QueuedState, Version
from tpuapi.core.world import Timings, World
from tpuapi.machine import maintenance
from tpuapi.machine.advance import advance, next_due
from tpuapi.methods import nodes, queued_resources
from tpuapi.methods.answering import Call, Method
from tpuapi.methods.maintenance import simulate_maintenance_event

PARENT = "projects/p/locations/z-a"
IDS = ("a", "b", "c")
POLICIES: tuple[dict[str, str], ...] = ({}, {"valid_until_duration": "70s"}, {"valid_after_duration": "50s"})

Step = tuple[str, str, int]

STEPS = st.tuples(
    st.sampled_from(
        ("create", "delete", "reset", "delete node", "preempt", "maintain", "simulate", "capacity", "wait")
    ),
    st.sampled_from(IDS),
    st.integers(0, 3) | st.integers(0, 200),
)


def call(world: World, method: Method, request: Json) -> World:
    try:
        return method(world, request, Call(Version.V2ALPHA1, world.now))[0]
    except ApiError:
        return world


def create(world: World, name: str, number: int) -> World:
    spec = {
        "parent": PARENT,
        "multi_node_params": {"node_count": 2},
        "node": {
            "accelerator_type": "v5litepod-4",
            "runtime_version": "v",
            "autocheckpoint_enabled": number % 2 == 0,
        },
    }
    body = {"tpu": {"node_spec": [spec]}, "queueing_policy": POLICIES[number % len(POLICIES)]}
    request = {"parent": PARENT, "queued_resource_id": name, "queued_resource": body}
    return call(world, queued_resources.create_queued_resource, request)


def take(world: World, step: Step) -> World:
    """Do what a step of a story says, at the world's own time."""
    kind, name, number = step
    resource, node = f"{PARENT}/queuedResources/{name}", f"{PARENT}/nodes/{name}-{number % 2}"
    match kind:
        case "create":
            return create(world, name, number)
        case "delete":
            request = {"name": resource, "force": number % 2 == 0}
            return call(world, queued_resources.delete_queued_resource, request)
        case "reset":
            return call(world, queued_resources.reset_queued_resource, {"name": resource})
        case "delete node":
            return call(world, nodes.delete_node, {"name": node})
        case "preempt" if node in world.nodes:
            return maintenance.preempt(world, node, world.now)
        case "maintain" if node in world.nodes:
            window = Maintenance(
                kind="SCHEDULED",
                can_reschedule=False,
                start=world.now + number,
                end=world.now + 2 * number,
                latest_start=world.now + number,
                ends_in=(NodeState.REPAIRING, NodeState.TERMINATED)[number % 2],
            )
            return world.with_node(replace(world.nodes[node], maintenance=window))
        case "simulate":
            return call(world, simulate_maintenance_event, {"name": node})
        case "capacity":
            return replace(world, capacity={("z-a", "V5LITE_POD"): number // 10})
        case _:
            return world


def tell(steps: list[Step], seams: int) -> World:
    """Tell a story; between two steps time passes at once, or in as many parts as there are seams."""
    world = advance(World(timings=Timings(accepted_s=3)), 0)
    for step in steps:
        start = world.now
        for part in range(1, seams + 1):
            world = advance(world, start + step[2] * part / seams)
            check(world)
        world = advance(take(world, step), world.now)
        check(world)
    return world


def check(world: World) -> None:
    owners = {node.queued_resource for node in world.nodes.values()}
    assert owners <= world.queued.keys(), "a node outlives its queued resource"
    for resource in world.queued.values():
        own = list(world.nodes_of(resource.name))
        ids = {node_id for spec in resource.specs for node_id in spec.node_ids}
        match resource.state:
            case QueuedState.PROVISIONING | QueuedState.ACTIVE:
                assert {node.node_id for node in own} == ids
            case QueuedState.SUSPENDING | QueuedState.DELETING:
                assert all(node.state is not NodeState.READY for node in own)
            case _:
                assert own == [], f"{resource.state} has nodes"
        if resource.state is QueuedState.FAILED:
            assert resource.error is not None
    for operation in world.operations.values():
        there = operation.target in world.queued or operation.target in world.nodes
        assert there or operation.end_time is not None, f"{operation} never ends"
    assert [event.at for event in world.events] == sorted(event.at for event in world.events)


@given(st.lists(STEPS, max_size=25))
def test_time_has_no_seams(steps: list[Step]) -> None:
    assert tell(steps, 1) == tell(steps, 4)


@given(st.lists(STEPS, max_size=25))
def test_everything_settles_once_nobody_asks_for_more(steps: list[Step]) -> None:
    """With room for all, every request ends ACTIVE, SUSPENDED or FAILED, and every operation ends."""
    world = replace(tell(steps, 1), capacity={})
    world = advance(world, world.now)
    for _ in range(200):
        due = next_due(world)
        if due is None:
            break
        world = advance(world, due)
        check(world)
    assert next_due(world) is None
    settled = {QueuedState.ACTIVE, QueuedState.SUSPENDED, QueuedState.FAILED}
    assert {resource.state for resource in world.queued.values()} <= settled
    assert [each for each in world.operations.values() if each.end_time is None] == []
