"""What the documentation demands of a QueuedResource in a request to create it."""

import re
from dataclasses import dataclass
from typing import Any

from tpuapi.core.errors import already_exists, invalid, not_found
from tpuapi.core.names import NODES, Location, check_id, parse_location
from tpuapi.core.values import Json, NodeSpec, StartWindow, Tier
from tpuapi.core.world import World
from tpuapi.rules.nodes import read_node
from tpuapi.rules.times import read_duration_s, read_time

OUTPUT_ONLY = ("name", "create_time", "state")

_RESERVATION = re.compile(r"projects/[^/]+/locations/[^/]+/reservations/[^/]+")
_FIELD = "queued_resource"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A QueuedResource that keeps all rules."""

    body: Json
    specs: tuple[NodeSpec, ...]
    tier: Tier
    window: StartWindow


def read_queued(world: World, location: Location, resource_id: str, body: Json | None, now: float) -> Asked:
    """Check a queued resource that is to be created.

    Args:
        world: What there is.
        location: The parent.
        resource_id: Its id, the default prefix of its nodes' ids.
        body: The QueuedResource; None if the request has none.
        now: What relative times count from.

    Raises:
        ApiError: It breaks a rule, or a node of one of its names is there or asked for.
    """
    if body is None:
        raise invalid(_FIELD, "the queued resource is required")
    node_specs = body.get("tpu", {}).get("node_spec", ())
    if not node_specs:
        raise invalid(f"{_FIELD}.tpu.node_spec", "at least one node has to be asked for")
    read = [_read_spec(world, location, resource_id, spec, index) for index, spec in enumerate(node_specs)]
    specs = tuple(spec for spec, _ in read)
    _check_node_names(world, location, specs)
    _check_reservation(world, body)
    cleaned: dict[str, Any] = {key: value for key, value in body.items() if key not in OUTPUT_ONLY}
    cleaned["tpu"] = {**body["tpu"], "node_spec": [json for _, json in read]}
    return Asked(
        body=cleaned,
        specs=specs,
        tier=next((tier for tier in Tier if tier.value and tier.value in body), Tier.NONE),
        window=_read_window(body.get("queueing_policy", {}), now),
    )


def _read_spec(
    world: World, location: Location, resource_id: str, spec: Json, index: int
) -> tuple[NodeSpec, Json]:
    field = f"{_FIELD}.tpu.node_spec[{index}]"
    if not spec.get("parent"):
        raise invalid(f"{field}.parent", "the parent of the nodes is required")
    if parse_location(spec["parent"], f"{field}.parent") != location:
        raise invalid(f"{field}.parent", f"'{spec['parent']}' is not the queued resource's, {location.path}")
    if "node" not in spec:
        raise invalid(f"{field}.node", "the node is required")
    params = spec.get("multi_node_params")
    if params is not None and spec.get("node_id"):
        raise invalid(
            f"{field}.multi_node_params", "it's an error to specify both node_id and multi_node_params"
        )
    node_ids = (
        (check_id(spec.get("node_id", ""), f"{field}.node_id"),)
        if params is None
        else _numbered_ids(params, resource_id, f"{field}.multi_node_params")
    )
    body, accelerator = read_node(world, spec["node"], f"{field}.node", len(node_ids))
    read = NodeSpec(node_ids=node_ids, accelerator=accelerator, is_multislice=params is not None, body=body)
    return read, {**spec, "node": body}


def _numbered_ids(params: Json, resource_id: str, field: str) -> tuple[str, ...]:
    count = int(params.get("node_count", 0))
    if count <= 1:
        raise invalid(f"{field}.node_count", f"{count} is not greater than 1")
    prefix = params.get("node_id_prefix") or resource_id
    check_id(prefix, f"{field}.node_id_prefix")
    return tuple(f"{prefix}-{number}" for number in range(count))


def _check_node_names(world: World, location: Location, specs: tuple[NodeSpec, ...]) -> None:
    asked = [location.name(NODES, node_id) for spec in specs for node_id in spec.node_ids]
    taken = set(world.nodes) | {
        resource.location.name(NODES, node_id)
        for resource in world.queued.values()
        for spec in resource.specs
        for node_id in spec.node_ids
    }
    for name in asked:
        if name in taken or asked.count(name) > 1:
            raise already_exists(name)


def _check_reservation(world: World, body: Json) -> None:
    name = body.get("reservation_name", "")
    if name and _RESERVATION.fullmatch(name) is None:
        raise invalid(
            f"{_FIELD}.reservation_name",
            f"'{name}' is not of the form projects/{{project}}/locations/{{zone}}/reservations/{{reservation}}",
        )
    if name and name not in world.reservations:
        raise not_found(name)


def _read_window(policy: Json, now: float) -> StartWindow:
    field = f"{_FIELD}.queueing_policy"
    window = StartWindow()
    match policy:
        case {"valid_until_duration": str(text)}:
            window = StartWindow(not_after=now + _positive(text, f"{field}.valid_until_duration"))
        case {"valid_until_time": str(text)}:
            window = StartWindow(not_after=read_time(text, f"{field}.valid_until_time"))
        case {"valid_after_duration": str(text)}:
            window = StartWindow(not_before=now + _positive(text, f"{field}.valid_after_duration"))
        case {"valid_after_time": str(text)}:
            window = StartWindow(not_before=read_time(text, f"{field}.valid_after_time"))
        case {"valid_interval": interval}:
            start, end = interval.get("start_time"), interval.get("end_time")
            window = StartWindow(
                not_before=read_time(start, f"{field}.valid_interval.start_time") if start else 0.0,
                not_after=read_time(end, f"{field}.valid_interval.end_time") if end else None,
            )
        case _:
            pass
    if window.not_after is not None and window.not_after <= window.not_before:
        raise invalid(field, "the interval ends before it starts")
    if window.not_after is not None and window.not_after <= now:
        raise invalid(field, "the time by which the request has to be fulfilled has passed")
    return window


def _positive(text: str, field: str) -> float:
    seconds = read_duration_s(text)
    if seconds <= 0:
        raise invalid(field, f"'{text}' is not a positive duration")
    return seconds
