"""Make jobs on the machines of a QueuedResource, and change the machines."""

from typing import Any, Final

from fake_cluster.world import World
from stepkeeper_operator.api.v1alpha1.conditions import Phase
from stepkeeper_operator.facts.raw import render_time

TPU: Final = {"accelerator": "v5e", "topology": "2x4", "chipsPerHost": 4, "queuedResourceName": "pod-a"}
_GUARANTEED: Final[dict[str, Any]] = {"guaranteed": {}}


def machines(
    *,
    tier: dict[str, Any] = _GUARANTEED,
    active: bool = True,
    joined: bool = True,
    state: str = "Active",
    message: str = "",
    count: int = 1,
    autocheckpoint: bool | None = None,
    namespace: str = "default",
    deleting: bool = False,
    maintenance_at: tuple[float, ...] = (),
    removing: str = "",
    read_back: str = "",
    missing_since: float | None = None,
    join_timed_out: bool = False,
    uid: str = "uid-a",
) -> dict[str, Any]:
    """Make a QueuedResource as the API server has it."""
    slices: dict[str, Any] = {"accelerator": "v5e", "topology": "2x4", "image": "r", "count": count}
    if autocheckpoint is not None:
        slices["autocheckpointEnabled"] = autocheckpoint
    conditions = [
        {"type": "Active", "status": str(active), "message": message},
        {
            "type": "NodesJoined",
            "status": str(joined),
            "reason": "JoinTimeout" if join_timed_out else "Joining",
            "message": message,
        },
    ]
    status: dict[str, Any] = {
        "state": state,
        "conditions": conditions,
        "removal": {"reason": removing} if removing else None,
        "missingHostsSince": None if missing_since is None else render_time(missing_since),
        "autocheckpoint": read_back,
    }
    if maintenance_at:
        status["nextMaintenanceTime"] = render_time(min(maintenance_at))
        status["slices"] = [
            {
                "name": f"pod-a-{index}",
                "state": "Ready",
                "upcomingMaintenance": {"status": "Pending", "windowStart": render_time(begin)},
            }
            for index, begin in enumerate(maintenance_at)
        ]
        conditions.append({"type": "MaintenanceScheduled", "status": "True", "message": "from 10:00"})
    meta: dict[str, Any] = {"name": "pod-a", "namespace": namespace, "uid": uid}
    if deleting:
        meta["deletionTimestamp"] = render_time(1_800_000_000.0)
    spec = {"project": "lab-tpus", "zone": "us-central2-b", "slices": slices, "tier": tier}
    return {"metadata": meta, "spec": spec, "status": status}


def world_of(resource: dict[str, Any] | None, **spec: Any) -> World:
    """Make a world whose job names QueuedResource pod-a."""
    world = World(placement={"tpu": TPU}, **spec)
    if resource is not None:
        world.cluster.put("queuedresources", resource)
    return world


async def running(*, restarts: dict[str, Any] | None = None, **resource: Any) -> World:
    """Make a world whose job, with this `spec.restarts`, runs on such machines."""
    world = world_of(machines(**resource), restarts=restarts or {})
    await world.run_until_settled(rounds=4)
    assert world.phase() is Phase.RUNNING
    return world


async def change(world: World, **resource: Any) -> None:
    """Change the machines, and let the operator observe it."""
    world.cluster.put("queuedresources", machines(**resource))
    await world.run_until_settled()
