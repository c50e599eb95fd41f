"""Convert between Google's messages, of either version of the API, and the values of `cloud`. Pure."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from google.protobuf import json_format

from stepkeeper_operator.cloud_tpu.cloud import (
    ApiVersion,
    CloudMaintenance,
    CloudNode,
    CloudQueuedResource,
    CloudRequest,
    Place,
)
from stepkeeper_operator.cloud_tpu.errors import explain_status

__all__ = ["build_queued_resource", "read_node", "read_queued_resource"]

_TIERS: Final = ("guaranteed", "spot", "best_effort")
_MULTI_NODE: Final = {ApiVersion.V2: "multislice_params", ApiVersion.V2ALPHA1: "multi_node_params"}
_MAX_SYMPTOMS: Final = 8


def build_queued_resource(request: CloudRequest, message: Any) -> Any:
    """Fill an empty message of the request's version. Raises ParseError for a field or value unknown to it."""
    spec: dict[str, Any] = {"parent": request.place.parent, "node": dict(request.node)}
    if request.node_id_prefix is None:
        spec["node_id"] = request.node_ids[0]
    else:
        spec[_MULTI_NODE[request.api_version]] = {
            "node_count": len(request.node_ids),
            "node_id_prefix": request.node_id_prefix,
        }
    fields: dict[str, Any] = {"tpu": {"node_spec": [spec]}, **request.tier}
    if request.queueing:
        fields["queueing_policy"] = dict(request.queueing)
    if request.reservation_name is not None:
        fields["reservation_name"] = request.reservation_name
    return json_format.ParseDict(fields, message)


def read_queued_resource(message: Any) -> CloudQueuedResource:
    """Read a QueuedResource message of either version."""
    raw = _to_dict(message)
    place, queued_resource_id = _split_name(raw["name"])
    specs = raw.get("tpu", {}).get("node_spec", [])
    state = raw.get("state", {})
    error = state.get("failed_data", {}).get("error", {})
    explained = explain_status(error.get("code", 0), error.get("message", "")) if error else None
    return CloudQueuedResource(
        place=place,
        id=queued_resource_id,
        state=state.get("state", "STATE_UNSPECIFIED"),
        initiator=state.get("state_initiator", ""),
        node_ids=tuple(node_id for spec in specs for node_id in _list_node_ids(spec, queued_resource_id)),
        node=_read_node_of_request(specs[0].get("node", {})) if specs else {},
        tier={tier: raw[tier] for tier in _TIERS if tier in raw},
        queueing=raw.get("queueing_policy", {}),
        reservation_name=raw.get("reservation_name"),
        create_time=_parse_time(raw.get("create_time")),
        error_code="" if explained is None else explained.code,
        error_message="" if explained is None else explained.message,
    )


def read_node(message: Any, version: ApiVersion) -> CloudNode:
    """Read a Node message of either version."""
    raw = _to_dict(message)
    place, node_id = _split_name(raw["name"])
    endpoints = raw.get("network_endpoints", [])
    # A false bool is absent from the wire: only v2alpha1 has the field.
    autocheckpoint = None if version is ApiVersion.V2 else bool(raw.get("autocheckpoint_enabled", False))
    return CloudNode(
        place=place,
        id=node_id,
        state=raw.get("state", "STATE_UNSPECIFIED"),
        health=raw.get("health", ""),
        health_description=raw.get("health_description", ""),
        symptoms=_describe_symptoms(raw.get("symptoms", [])),
        n_hosts=len(endpoints),
        addresses=tuple(endpoint.get("ip_address", "") for endpoint in endpoints),
        labels=raw.get("labels", {}),
        queued_resource=raw.get("queued_resource", ""),
        autocheckpoint_enabled=autocheckpoint,
        maintenance=_read_maintenance(raw.get("upcoming_maintenance")),
    )


def _to_dict(message: Any) -> dict[str, Any]:
    raw: dict[str, Any] = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return _name_enums(raw, message.DESCRIPTOR)


def _name_enums(raw: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """Write UNKNOWN(77) for each enum value that Google's package doesn't know and leaves as a number."""
    fields = kind.fields_by_name  # the keys of a map aren't names of fields
    return {name: _name_enum(value, fields[name]) if name in fields else value for name, value in raw.items()}


def _name_enum(value: Any, field: Any) -> Any:
    if isinstance(value, list):
        return [_name_enum(each, field) for each in value]
    if isinstance(value, dict) and field.message_type is not None:
        return _name_enums(value, field.message_type)
    return f"UNKNOWN({value})" if field.enum_type is not None and isinstance(value, int) else value


def _split_name(name: str) -> tuple[Place, str]:
    """Split projects/<project>/locations/<zone>/<collection>/<id>."""
    _, project, _, zone, _, object_id = name.split("/", 5)
    return Place(project=project, zone=zone), object_id


def _read_node_of_request(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Restore the API's field names: Google's package appends an underscore to Python's reserved words."""
    config = raw.get("accelerator_config")
    if config is None:
        return dict(raw)
    return {**raw, "accelerator_config": {name.removesuffix("_"): value for name, value in config.items()}}


def _list_node_ids(spec: Mapping[str, Any], queued_resource_id: str) -> tuple[str, ...]:
    several = next((spec[name] for name in _MULTI_NODE.values() if name in spec), None)
    if several is None:
        return (spec["node_id"],) if "node_id" in spec else ()
    prefix = several.get("node_id_prefix") or queued_resource_id
    return tuple(f"{prefix}-{number}" for number in range(several.get("node_count", 0)))


def _describe_symptoms(symptoms: list[Mapping[str, Any]]) -> tuple[str, ...]:
    newest = sorted(symptoms, key=lambda symptom: str(symptom.get("create_time", "")), reverse=True)
    lines = (
        f"{symptom.get('symptom_type', 'SYMPTOM_TYPE_UNSPECIFIED')} on worker {symptom.get('worker_id', '?')}"
        f" {symptom.get('details', '')}".rstrip()
        for symptom in newest[:_MAX_SYMPTOMS]
    )
    return tuple(lines)


def _read_maintenance(raw: Mapping[str, Any] | None) -> CloudMaintenance | None:
    if not raw:
        return None
    return CloudMaintenance(
        type=raw.get("type_", "UNKNOWN_TYPE"),
        status=raw.get("maintenance_status", "UNKNOWN"),
        window_start=_parse_time(raw.get("window_start_time")),
        window_end=_parse_time(raw.get("window_end_time")),
    )


def _parse_time(text: str | None) -> int | None:
    """Return Unix seconds; None for no time or an invalid one: the API's maintenance times are free text."""
    if not text:
        return None
    try:
        return int(datetime.fromisoformat(text).timestamp())
    except ValueError:
        return None
