"""The messages of both versions of the API, and their JSON form, which the service works on.

The generated classes have no types: what comes from them is Any here, and nowhere else.
"""

from types import ModuleType
from typing import Any

from google.cloud.tpu_v2.types import cloud_tpu as v2
from google.cloud.tpu_v2alpha1.types import cloud_tpu as v2alpha1
from google.longrunning import operations_pb2
from google.protobuf import empty_pb2, json_format
from google.protobuf.message import Message

from tpuapi.core.errors import Status
from tpuapi.core.values import Json, Node, Operation, QueuedResource, Version
from tpuapi.rules.times import write_time
from tpuapi.wire.status import to_proto
from tpuapi.wire.views import view_node, view_queued

TYPES: dict[Version, ModuleType] = {Version.V2: v2, Version.V2ALPHA1: v2alpha1}

_MULTI_NODE = {Version.V2: "multislice_params", Version.V2ALPHA1: "multi_node_params"}


def read_message(version: Version, message: Any) -> Json:
    """Read a generated message of a version into JSON with the field names of v2alpha1."""
    json: dict[str, Any] = json_format.MessageToDict(
        type(message).pb(message), preserving_proto_field_name=True
    )
    if "queued_resource" in json:
        json["queued_resource"] = _renamed(
            json["queued_resource"], _MULTI_NODE[version], _MULTI_NODE[Version.V2ALPHA1]
        )
    return json


def write_message(version: Version, name: str, json: Json) -> Any:
    """Write JSON as a message of a version. Fields and enum values that the version doesn't have are left out."""
    message_class = getattr(TYPES[version], name)
    message = message_class()
    json_format.ParseDict(dict(json), message_class.pb(message), ignore_unknown_fields=True)
    return message


def write_queued(version: Version, resource: QueuedResource) -> Any:
    renamed = _renamed(view_queued(resource), _MULTI_NODE[Version.V2ALPHA1], _MULTI_NODE[version])
    message = write_message(version, "QueuedResource", renamed)
    if resource.error is not None and resource.state == "FAILED":
        message.state.failed_data.error = to_proto(resource.error)
    return message


def write_node(version: Version, node: Node) -> Any:
    return write_message(version, "Node", view_node(node))


def write_operation(operation: Operation) -> operations_pb2.Operation:
    """Write an operation: its metadata and its response are messages of the version that began it."""
    metadata = {
        "create_time": write_time(operation.create_time),
        "target": operation.target,
        "verb": operation.verb,
        "cancel_requested": operation.cancel_requested,
        "api_version": operation.version.value,
    }
    if operation.end_time is not None:
        metadata["end_time"] = write_time(operation.end_time)
    written = operations_pb2.Operation(name=operation.name, done=operation.end_time is not None)
    written.metadata.Pack(_pb(write_message(operation.version, "OperationMetadata", metadata)))
    if operation.end_time is not None:
        _write_outcome(written, operation, operation.error)
    return written


def _write_outcome(written: operations_pb2.Operation, operation: Operation, error: Status | None) -> None:
    if error is not None:
        written.error.CopyFrom(to_proto(error))
        return
    match operation.result:
        case QueuedResource() as resource if not (operation.verb == "delete" and operation.version == "v2"):
            written.response.Pack(_pb(write_queued(operation.version, resource)))
        case Node() as node:
            written.response.Pack(_pb(write_node(operation.version, node)))
        case _:
            # Deletions answer with nothing, but for the one of a queued resource in v2alpha1.
            written.response.Pack(empty_pb2.Empty())


def _pb(message: Any) -> Message:
    raw: Message = type(message).pb(message)
    return raw


def _renamed(resource: Json, old: str, new: str) -> Json:
    """Return a QueuedResource whose node specs have one field under another name."""
    if old == new or "tpu" not in resource:
        return resource
    specs = [
        {new if key == old else key: value for key, value in spec.items()}
        for spec in resource["tpu"].get("node_spec", ())
    ]
    return {**resource, "tpu": {**resource["tpu"], "node_spec": specs}}
