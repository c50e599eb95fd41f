"""Build the request for a cloud resource from a spec. Pure."""

import hashlib
import json
from typing import Any, Final

from stepkeeper_operator.api.v1alpha1.queuedresource import (
    QueuedResource,
    QueuedResourceSpec,
    QueueingSpec,
    TierSpec,
)
from stepkeeper_operator.api.v1alpha1.queuedresource_node import DiskMode, NetworkSpec, NodeSpec
from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceStatus
from stepkeeper_operator.cloud_tpu.cloud import ApiVersion, CloudRequest, Place
from stepkeeper_operator.facts.raw import render_time
from stepkeeper_operator.queued_resources.naming import (
    NODE_LABELS_KEY,
    STARTUP_SCRIPT_KEY,
    make_cloud_id,
    make_labels,
    make_node_ids,
    make_node_labels,
    make_request_id,
)

__all__ = ["build_request", "choose_api_version", "hash_spec", "place_of", "read_api_version", "was_changed"]

_DEFAULT_NETWORKS: Final = {"default", "global/networks/default"}
_DISK_MODES: Final = {DiskMode.READ_WRITE: "READ_WRITE", DiskMode.READ_ONLY: "READ_ONLY"}


def place_of(spec: QueuedResourceSpec) -> Place:
    """Return the place that the spec names."""
    return Place(project=spec.project, zone=spec.zone)


def hash_spec(spec: QueuedResourceSpec) -> str:
    """Hash the fields that the cloud can't change on a live resource, in the words of the request that they make.

    So a default doesn't count, written out or not, and an operator with a new field doesn't recreate everything.
    """
    script = spec.node.startup_script_secret_ref
    asked = [
        _build_node(spec.node, autocheckpoint=spec.autocheckpoint),
        [spec.node.labels, spec.node.metadata, spec.node.count, spec.node.id_prefix],
        None if script is None else [script.name, script.key],
        [_build_tier(spec.tier), _build_queueing(spec.queueing), spec.reservation_path],
    ]
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


def was_changed(spec: QueuedResourceSpec, made_with: str) -> bool:
    """Return True if the spec is known to ask for something else than the one that was hashed to `made_with`."""
    return bool(made_with) and made_with != hash_spec(spec) and not spec.hides_changes()


def choose_api_version(spec: QueuedResourceSpec) -> ApiVersion:
    """Choose the version of the Cloud TPU API that has what the spec asks for."""
    reserved = spec.tier.guaranteed is not None and spec.tier.guaranteed.reserved
    needs_alpha = spec.autocheckpoint or spec.tier.best_effort is not None or reserved
    return ApiVersion.V2ALPHA1 if needs_alpha else ApiVersion.V2


def read_api_version(status: QueuedResourceStatus) -> ApiVersion:
    """Return the version by which the present one was made."""
    return ApiVersion.V2ALPHA1 if status.api_version == ApiVersion.V2ALPHA1 else ApiVersion.V2


def build_request(
    resource: QueuedResource, *, number: int, cluster_id: str, script: str | None
) -> CloudRequest:
    """Build the request for the `number`th cloud resource. `script` is the startup script from its Secret."""
    meta, spec = resource.metadata, resource.spec
    cloud_id = make_cloud_id(meta.namespace, meta.name, number)
    node_ids, prefix = make_node_ids(resource, cloud_id)
    node = _build_node(spec.node, autocheckpoint=spec.autocheckpoint)
    node["labels"] = {**spec.node.labels, **make_labels(meta, cluster_id)}
    node["metadata"] = {
        **spec.node.metadata,
        **({} if script is None else {STARTUP_SCRIPT_KEY: script}),
        NODE_LABELS_KEY: ",".join(f"{key}={value}" for key, value in make_node_labels(meta).items()),
    }
    tier, queueing = _build_tier(spec.tier), _build_queueing(spec.queueing)
    digest = hashlib.sha256(
        json.dumps([node, tier, queueing, spec.reservation_path, node_ids], sort_keys=True).encode()
    ).hexdigest()
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
        reservation_name=spec.reservation_path,
    )


def _build_node(spec: NodeSpec, *, autocheckpoint: bool) -> dict[str, Any]:
    node: dict[str, Any] = {"runtime_version": spec.runtime_version}
    if spec.accelerator_type is not None:
        node["accelerator_type"] = spec.accelerator_type
    if spec.accelerator_config is not None:
        config = spec.accelerator_config
        node["accelerator_config"] = {"type": config.type.value, "topology": config.topology}
    if spec.network is not None and (network := _build_network(spec.network)):
        node["network_config"] = network
    if spec.service_account is not None:
        account = spec.service_account
        node["service_account"] = {"email": account.email, "scope": sorted(account.scopes)}
    if spec.tags:
        node["tags"] = sorted(spec.tags)
    if spec.data_disks:
        node["data_disks"] = [
            {"source_disk": disk.source_disk, "mode": _DISK_MODES[disk.mode]} for disk in spec.data_disks
        ]
    if spec.secure_boot:
        node["shielded_instance_config"] = {"enable_secure_boot": True}
    if autocheckpoint:
        node["autocheckpoint_enabled"] = True
    return node


def _build_network(spec: NetworkSpec) -> dict[str, Any]:
    fields = {
        "network": None if spec.network in _DEFAULT_NETWORKS else spec.network,
        "subnetwork": spec.subnetwork,
        "enable_external_ips": spec.external_ips,
        "can_ip_forward": spec.can_ip_forward,
    }
    return {name: value for name, value in fields.items() if value}


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
    durations = {
        "valid_until_duration": spec.valid_until_seconds,
        "valid_after_duration": spec.valid_after_seconds,
    }
    moments = {"valid_until_time": spec.valid_until_time, "valid_after_time": spec.valid_after_time}
    queueing: dict[str, Any] = {
        **{name: f"{seconds}s" for name, seconds in durations.items() if seconds is not None},
        **{name: render_time(at) for name, at in moments.items() if at is not None},
    }
    if spec.valid_interval is not None:
        start, end = spec.valid_interval.start_time, spec.valid_interval.end_time
        queueing["valid_interval"] = {"start_time": render_time(start), "end_time": render_time(end)}
    return queueing
