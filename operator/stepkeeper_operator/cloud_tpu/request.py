"""Build the request for a cloud resource from a spec, in the terms of the Cloud TPU API. Pure."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from stepkeeper_operator.api.accelerators import Accelerator, count_chips
from stepkeeper_operator.api.v1alpha1.queuedresource import (
    QueuedResource,
    QueuedResourceSpec,
    QueueingSpec,
    TierSpec,
)
from stepkeeper_operator.api.v1alpha1.queuedresource_slices import DiskMode, NetworkSpec, SlicesSpec
from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceStatus
from stepkeeper_operator.cloud_tpu.cloud import ApiVersion, CloudRequest, Place
from stepkeeper_operator.cloud_tpu.naming import (
    NODE_LABELS_KEY,
    STARTUP_SCRIPT_KEY,
    make_cloud_id,
    make_labels,
    make_node_ids,
    make_node_labels,
    make_request_id,
    parse_cloud_name,
)
from stepkeeper_operator.facts.raw import render_time

__all__ = [
    "build_request",
    "build_reservation_name",
    "choose_api_version",
    "hash_spec",
    "name_accelerators",
    "place_of",
    "read_api_version",
    "was_changed",
]


class _Generation(NamedTuple):
    """The names of a TPU generation in the API."""

    config_type: str
    """Its value of AcceleratorConfig.Type."""

    prefix: str
    """Prefix of its accelerator types, for example v5litepod of v5litepod-16."""

    cores_per_chip: int
    """The number in an accelerator type counts cores."""


_GENERATIONS: Final = {
    Accelerator.V4: _Generation("V4", "v4", 2),
    Accelerator.V5E: _Generation("V5LITE_POD", "v5litepod", 1),
    Accelerator.V5P: _Generation("V5P", "v5p", 2),
    Accelerator.V6E: _Generation("V6E", "v6e", 1),
    Accelerator.V7X: _Generation("V7X", "v7x", 2),  # the API rejects it
}
_DEFAULT_NETWORKS: Final = {"default", "global/networks/default"}
_DISK_MODES: Final = {DiskMode.READ_WRITE: "READ_WRITE", DiskMode.READ_ONLY: "READ_ONLY"}


def place_of(spec: QueuedResourceSpec) -> Place:
    """Return the place that the spec names."""
    return Place(project=spec.project, zone=spec.zone)


def hash_spec(spec: QueuedResourceSpec) -> str:
    """Hash the fields that the cloud can't change on an existing resource, in the form of the request.

    In this form, a default has the same hash whether it is written out or not, and so has a new field that isn't set.
    """
    slices, script = spec.slices, spec.slices.startup_script_secret_ref
    fields = [
        _build_node(spec),
        [slices.labels, slices.metadata, slices.count, slices.name_prefix],
        None if script is None else [script.name, script.key],
        [_build_tier(spec.tier), _build_queueing(spec.queueing), build_reservation_name(spec)],
    ]
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


def was_changed(spec: QueuedResourceSpec, status: QueuedResourceStatus) -> bool:
    """Return True if the spec is known to differ from the one that the current cloud resource was created with."""
    made_with, place = status.operator.spec_hash, parse_cloud_name(status.cloud_name)
    if place is not None and place.project.isdecimal():  # the cloud may name the project by its number
        place = replace(place, project=spec.project)
    moved = place not in {None, place_of(spec)}
    return bool(made_with) and (moved or made_with != hash_spec(spec)) and not spec.hides_changes()


def read_api_version(status: QueuedResourceStatus) -> ApiVersion:
    """Return the version of the API that created the current cloud resource."""
    return ApiVersion.V2ALPHA1 if status.provider == ApiVersion.V2ALPHA1.provider else ApiVersion.V2


def build_request(
    resource: QueuedResource, *, number: int, cluster_id: str, script: str | None
) -> CloudRequest:
    """Build the request for the `number`th cloud resource. `script` is the startup script from the Secret."""
    meta, spec = resource.metadata, resource.spec
    cloud_id = make_cloud_id(meta.namespace, meta.name, number)
    node_ids, prefix = make_node_ids(resource, cloud_id)
    node = _build_node(spec)
    node["labels"] = {**spec.slices.labels, **make_labels(meta, cluster_id)}
    node["metadata"] = {
        **spec.slices.metadata,
        **({} if script is None else {STARTUP_SCRIPT_KEY: script}),
        NODE_LABELS_KEY: ",".join(f"{key}={value}" for key, value in make_node_labels(meta).items()),
    }
    tier, queueing = _build_tier(spec.tier), _build_queueing(spec.queueing)
    reservation = build_reservation_name(spec)
    text = json.dumps([node, tier, queueing, reservation, node_ids], sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return CloudRequest(
        place=place_of(spec),
        id=cloud_id,
        request_id=make_request_id(meta.uid, number, "create", digest),
        api_version=choose_api_version(spec),
        node_ids=node_ids,
        node_id_prefix=prefix,
        node=node,
        tier=tier,
        queueing=queueing,
        reservation_name=reservation,
    )


def choose_api_version(spec: QueuedResourceSpec) -> ApiVersion:
    """Choose the version of the API that has all fields of the spec."""
    reserved = spec.tier.guaranteed is not None and spec.tier.guaranteed.reserved
    needs_alpha = spec.autocheckpoint or spec.tier.best_effort is not None or reserved
    return ApiVersion.V2ALPHA1 if needs_alpha else ApiVersion.V2


def _build_node(spec: QueuedResourceSpec) -> dict[str, Any]:
    """Return the fields of Node (the API's slice), without labels, metadata, and fields at their defaults."""
    slices = spec.slices
    kind = _GENERATIONS[slices.accelerator].config_type
    config = {"type": kind, "topology": slices.topology}
    node: dict[str, Any] = {"runtime_version": slices.image, "accelerator_config": config}
    if slices.network is not None and (network := _build_network(slices.network)):
        node["network_config"] = network
    if slices.service_account is not None:
        account = slices.service_account
        node["service_account"] = {"email": account.email, "scope": sorted(account.scopes)}
    if slices.tags:
        node["tags"] = sorted(slices.tags)
    if slices.data_disks:
        disks = slices.data_disks
        node["data_disks"] = [{"source_disk": d.source_disk, "mode": _DISK_MODES[d.mode]} for d in disks]
    if slices.secure_boot:
        node["shielded_instance_config"] = {"enable_secure_boot": True}
    if spec.autocheckpoint:
        node["autocheckpoint_enabled"] = True
    return node


def _build_tier(tier: TierSpec) -> dict[str, Any]:
    if tier.spot is not None:
        return {"spot": {}}
    if tier.best_effort is not None:
        return {"best_effort": {}}
    guaranteed: dict[str, Any] = {}
    if tier.guaranteed is not None and tier.guaranteed.reserved:
        guaranteed["reserved"] = True
    if tier.guaranteed is not None and tier.guaranteed.min_duration_seconds is not None:
        guaranteed["min_duration"] = f"{tier.guaranteed.min_duration_seconds}s"
    return {"guaranteed": guaranteed}


def _build_queueing(spec: QueueingSpec | None) -> dict[str, Any]:
    if spec is None:
        return {}
    until_s, until, after = spec.valid_until_seconds, spec.valid_until_time, spec.valid_after_time
    if until_s is not None:
        return {"valid_until_duration": f"{until_s}s"}
    if until is not None and after is not None:
        return {"valid_interval": {"start_time": render_time(after), "end_time": render_time(until)}}
    if until is not None:
        return {"valid_until_time": render_time(until)}
    return {} if after is None else {"valid_after_time": render_time(after)}


def build_reservation_name(spec: QueuedResourceSpec) -> str | None:
    """Return the full name of the reservation."""
    if spec.reservation_name is None or "/" in spec.reservation_name:
        return spec.reservation_name
    return f"projects/{spec.project}/locations/{spec.zone}/reservations/{spec.reservation_name}"


def name_accelerators(wanted: SlicesSpec, found: Mapping[str, Any]) -> tuple[str, str]:
    """Describe the wanted and the existing accelerator in the same form: by topology if known, else by size."""
    generation, theirs = _GENERATIONS[wanted.accelerator], found.get("accelerator_config")
    if theirs:
        ours = {each.config_type: kind.value for kind, each in _GENERATIONS.items()}
        present = f"{ours.get(theirs['type'], theirs['type'])} {theirs['topology']}"
        return f"{wanted.accelerator.value} {wanted.topology}", present
    n_cores = generation.cores_per_chip * count_chips(wanted.topology)
    return f"{generation.prefix}-{n_cores}", str(found.get("accelerator_type"))


def _build_network(spec: NetworkSpec) -> dict[str, Any]:
    fields = {
        "network": None if spec.network in _DEFAULT_NETWORKS else spec.network,
        "subnetwork": spec.subnetwork,
        "enable_external_ips": spec.external_ips,
        "can_ip_forward": spec.can_ip_forward,
    }
    return {name: value for name, value in fields.items() if value}
