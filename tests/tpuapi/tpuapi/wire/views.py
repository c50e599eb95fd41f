"""The service's values in the JSON form of messages, with the field names of v2alpha1."""

from typing import Any

from tpuapi.core.values import Json, Maintenance, Node, QueuedResource, QueuedState, Version
from tpuapi.rules.times import write_time

_STATES_WITHOUT_DATA = (QueuedState.WAITING_FOR_RESOURCES,)
_API_VERSIONS = {Version.V2: "V2", Version.V2ALPHA1: "V2_ALPHA1"}
_PORT = 8470


def view_queued(resource: QueuedResource) -> Json:
    """Write a queued resource: as asked for, and what the service sets. The error of a failed one is added apart."""
    state: dict[str, Any] = {"state": resource.state.value, "state_initiator": resource.initiator.value}
    if resource.state not in _STATES_WITHOUT_DATA:
        state[f"{resource.state.value.lower()}_data"] = {}
    return {
        **resource.body,
        "name": resource.name,
        "create_time": write_time(resource.create_time),
        "state": state,
        **resource.shown,
    }


def view_node(node: Node) -> Json:
    """Write a node: as asked for, and what the service sets."""
    view: dict[str, Any] = {
        **node.body,
        "name": node.name,
        "accelerator_type": node.accelerator.type,
        "state": node.state.value,
        "health": node.health.value,
        "health_description": node.health_description,
        "create_time": write_time(node.create_time),
        "id": str(node.number),
        "api_version": _API_VERSIONS[node.version],
        "queued_resource": node.queued_resource,
        "multislice_node": node.is_multislice,
        "network_endpoints": [{"ip_address": address, "port": _PORT} for address in node.addresses],
        "symptoms": [
            {
                "create_time": write_time(symptom.create_time),
                "symptom_type": symptom.kind,
                "details": symptom.details,
                "worker_id": symptom.worker_id,
            }
            for symptom in node.symptoms
        ],
    }
    if node.queued_resource and node.is_preemptible:
        view["scheduling_config"] = {**node.body.get("scheduling_config", {}), "spot": True}
    if node.maintenance is not None:
        view["upcoming_maintenance"] = _view_maintenance(node.maintenance)
    return {**view, **node.shown}


def _view_maintenance(maintenance: Maintenance) -> Json:
    return {
        "type_": maintenance.kind,
        "can_reschedule": maintenance.can_reschedule,
        "window_start_time": write_time(maintenance.start),
        "window_end_time": write_time(maintenance.end),
        "latest_window_start_time": write_time(maintenance.latest_start),
        "maintenance_status": "ONGOING" if maintenance.is_ongoing else "PENDING",
    }
