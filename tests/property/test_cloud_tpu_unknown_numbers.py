"""Numbers of enums that google's package doesn't know are words to the operator, and stop nothing it does."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
from google.cloud import tpu_v2, tpu_v2alpha1
from google.protobuf import json_format

from fake_cluster.queued_resources import CLUSTER_ID, PLACE, created, decide, deleting, find, kinds, observe
from stepkeeper_operator.api.v1alpha1.queuedresource import QueuedResource
from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceState
from stepkeeper_operator.cloud_tpu.cloud import ApiVersion
from stepkeeper_operator.cloud_tpu.convert import build_queued_resource, read_node, read_queued_resource
from stepkeeper_operator.cloud_tpu.request import build_request
from stepkeeper_operator.queued_resources.decision import DeleteCloudResource

MODULES = {ApiVersion.V2: tpu_v2, ApiVersion.V2ALPHA1: tpu_v2alpha1}
SHOWN = {
    ("Node", "state"),
    ("Node", "health"),
    ("Node", "symptoms.symptom_type"),
    ("Node", "upcoming_maintenance.type_"),
    ("Node", "upcoming_maintenance.maintenance_status"),
    ("QueuedResource", "state.state"),
}
"""Enums whose words people see."""


def list_enums(kind: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """List the paths of all enums in a message and in what it holds."""
    for field in kind.fields:
        if field.enum_type is not None:
            yield (*path, field.name)
        elif field.message_type is not None and not field.message_type.full_name.startswith("google.p"):
            yield from list_enums(field.message_type, (*path, field.name))


ENUMS = [
    (version, name, ".".join(path))
    for version, module in MODULES.items()
    for name in ("Node", "QueuedResource")
    for path in list_enums(getattr(module, name).pb().DESCRIPTOR)
]
assert {(name, path) for _, name, path in ENUMS} >= SHOWN


def answer(resource: QueuedResource, version: ApiVersion) -> dict[str, Any]:
    """Make what the API answers with while the resource is active: the messages of its request, and of its node."""
    request = build_request(resource, number=0, cluster_id=CLUSTER_ID, script=None)
    queued, node = (getattr(MODULES[version], name).pb()() for name in ("QueuedResource", "Node"))
    build_queued_resource(request, queued)
    name = f"{PLACE.parent}/queuedResources/{request.id}"
    shown = {
        "name": f"{PLACE.parent}/nodes/{request.id}",
        "state": "READY",
        "queued_resource": name,
        "labels": request.node["labels"],
        "network_endpoints": [{"ip_address": "10.0.0.1"}],
    }
    return {
        "QueuedResource": json_format.ParseDict({"name": name, "state": {"state": "ACTIVE"}}, queued),
        "Node": json_format.ParseDict(shown, node),
    }


def put(message: Any, path: str, number: int) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        held = getattr(message, parent)
        message = (held[0] if len(held) else held.add()) if hasattr(held, "add") else held
    setattr(message, name, number)


def list_numbers(value: Any) -> Iterator[int]:
    if is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, int):
        yield value
    elif isinstance(value, dict):
        yield from (number for each in value.values() for number in list_numbers(each))
    elif isinstance(value, list | tuple):
        yield from (number for each in value for number in list_numbers(each))


@pytest.mark.parametrize("number", [-(2**31), -1, 50, 2**31 - 1])
@pytest.mark.parametrize(("version", "name", "path"), ENUMS)
def test_an_unknown_number_is_a_word_and_stops_nothing(
    version: ApiVersion, name: str, path: str, number: int
) -> None:
    live, gone = created(QueuedResourceState.ACTIVE), deleting()
    messages = answer(live, version)
    put(messages[name], path, number)
    queued = read_queued_resource(messages["QueuedResource"])
    node = read_node(messages["Node"], version)
    assert number not in {*list_numbers(queued), *list_numbers(node)}
    told = decide(live, observe(queued, nodes=[node]))
    assert told.actions == ()
    assert (f"UNKNOWN({number})" in str(told.status.to_raw())) is ((name, path) in SHOWN)
    if (name, path) == ("QueuedResource", "state.state"):
        assert f"UNKNOWN({number})" in find(told, "Active").message
        assert find(told, "Active").status == "False"
    ended = decide(gone, observe(queued, nodes=[node], pods=()))
    assert kinds(ended) == [DeleteCloudResource]
