"""Quotas and capacity, in cores. Requests eat quota until they are deleted, also failed and suspended ones."""

from tpuapi.core.accelerators import FAMILIES, Accelerator, Family
from tpuapi.core.errors import DOMAIN, ApiError, Code, QuotaViolation, Status
from tpuapi.core.names import Location
from tpuapi.core.values import NodeSpec, NodeState, QueuedResource
from tpuapi.core.world import QuotaKey, World


def used_cores(world: World, key: QuotaKey) -> int:
    """Sum what every request of the key holds, in whatever state, and every node that nobody queued for."""
    requested = sum(
        spec.accelerator.n_cores * len(spec.node_ids)
        for resource in world.queued.values()
        for spec in resource.specs
        if _key(resource.location, spec.accelerator, resource.tier.is_preemptible) == key
    )
    alone = sum(
        node.accelerator.n_cores
        for node in world.nodes.values()
        if not node.queued_resource and _key(node.location, node.accelerator, node.is_preemptible) == key
    )
    return requested + alone


def check_quota(
    world: World, location: Location, accelerators: list[Accelerator], *, preemptible: bool
) -> None:
    """Let a request pass if its cores fit into what is left.

    Raises:
        ApiError: They don't; RESOURCE_EXHAUSTED, with the limit in its details.
    """
    for family in FAMILIES:
        key = QuotaKey(location.project, location.zone, family.kind, preemptible)
        limit = world.quotas.get(key)
        wanted = sum(each.n_cores for each in accelerators if each.family is family)
        if limit is not None and wanted and used_cores(world, key) + wanted > limit:
            raise ApiError(quota_exceeded(location, family, limit, preemptible=preemptible))


def quota_exceeded(location: Location, family: Family, limit: int, *, preemptible: bool) -> Status:
    """Say it as the service does: with QuotaFailure and ErrorInfo."""
    before, after = family.quota_words
    quota_id = f"{before}{'Preemptible' if preemptible else ''}{after}PerProjectPerZoneForTPUAPI"
    kind = "preemptible_cores" if preemptible else "cores"
    metric = f"{DOMAIN}/{family.prefix}_{kind}"
    message = f"Quota limit '{quota_id}' has been exceeded. Limit: {limit} in zone {location.zone}."
    violation = QuotaViolation(
        subject=f"project:{location.project}",
        description=message,
        quota_metric=metric,
        quota_id=quota_id,
        limit=limit,
        dimensions={"zone": location.zone},
    )
    metadata = {
        "consumer": f"projects/{location.project}",
        "service": DOMAIN,
        "quota_metric": metric,
        "quota_limit": quota_id,
        "quota_limit_value": str(limit),
        "zone": location.zone,
    }
    return Status(
        code=Code.RESOURCE_EXHAUSTED,
        message=message,
        reason="RESOURCE_QUOTA_EXCEEDED",
        metadata=metadata,
        quotas=(violation,),
    )


def has_capacity(world: World, location: Location, specs: tuple[NodeSpec, ...]) -> bool:
    """Say whether the zone has room for all nodes of a request at once."""
    for family in FAMILIES:
        total = world.capacity.get((location.zone, family.kind))
        wanted = sum(s.accelerator.n_cores * len(s.node_ids) for s in specs if s.accelerator.family is family)
        if total is not None and wanted and _running_cores(world, location.zone, family) + wanted > total:
            return False
    return True


def quota_exceeded_by(world: World, resource: QueuedResource) -> Status | None:
    """Return what to fail a received request with that was beyond its quota, or None."""
    for family in {spec.accelerator.family.kind: spec.accelerator.family for spec in resource.specs}.values():
        preemptible = resource.tier.is_preemptible
        key = QuotaKey(resource.location.project, resource.location.zone, family.kind, preemptible)
        limit = world.quotas.get(key)
        if limit is not None and used_cores(world, key) > limit:
            return quota_exceeded(resource.location, family, limit, preemptible=preemptible)
    return None


def _running_cores(world: World, zone: str, family: Family) -> int:
    gone = (NodeState.PREEMPTED, NodeState.TERMINATED)
    return sum(
        node.accelerator.n_cores
        for node in world.nodes.values()
        if node.location.zone == zone and node.accelerator.family is family and node.state not in gone
    )


def _key(location: Location, accelerator: Accelerator, preemptible: bool) -> QuotaKey:
    return QuotaKey(location.project, location.zone, accelerator.family.kind, preemptible)
