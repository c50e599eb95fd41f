"""Compare what exists in the cloud with what a spec asks for, field by field. Pure.

Values of metadata are never repeated: a startup script holds the secret by which hosts join the cluster.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from pydantic.alias_generators import to_camel

from stepkeeper_operator.cloud_tpu.cloud import CloudQueuedResource, CloudRequest
from stepkeeper_operator.queued_resources.naming import (
    CLUSTER_LABEL,
    NAME_LABEL,
    NAMESPACE_LABEL,
    NODE_LABELS_KEY,
    UID_LABEL,
)

__all__ = ["find_differences"]

_OURS: Final = {CLUSTER_LABEL, NAMESPACE_LABEL, NAME_LABEL, UID_LABEL}
_PATHS: Final = {"network", "subnetwork", "source_disk"}
"""Fields that the API answers with a full path where a name was given."""

_LIMIT: Final = 100


def find_differences(asked: CloudRequest, found: CloudQueuedResource) -> tuple[str, ...]:
    """Describe every field in which the cloud resource is another one than is asked for. Empty: it matches.

    Only what the spec sets is compared: the cloud fills in the rest.
    """
    return (
        *_compare_lists("node ids", asked.node_ids, found.node_ids),
        *_compare_node(asked.node, found.node),
        *_compare("tier", asked.tier, found.tier or {"guaranteed": {}}),
        *_compare_reservation(asked, found),
        *(_compare("queueing", asked.queueing, found.queueing) if found.state != "ACTIVE" else ()),
    )


def _compare_node(asked: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(asked.keys() - {"labels", "metadata", "tags"}):
        if name == "data_disks":
            yield from _compare_disks(asked[name], found.get(name, []))
        else:
            yield from _compare(f"node.{to_camel(name)}", asked[name], found.get(name))
    if found.get("autocheckpoint_enabled") and not asked.get("autocheckpoint_enabled"):
        yield "node.autocheckpointEnabled: asked for false, the cloud has true"
    yield from _compare_lists("node.tags", sorted(asked.get("tags", ())), sorted(found.get("tags", ())))
    labels = found.get("labels", {})
    for key, value in sorted(asked.get("labels", {}).items()):
        if key not in _OURS and labels.get(key) != value:
            yield _describe(f"node.labels.{key}", value, labels.get(key))
    metadata = found.get("metadata", {})
    for key, value in sorted(asked.get("metadata", {}).items()):
        if key != NODE_LABELS_KEY and metadata.get(key) != value:
            yield f"node.metadata.{key}: {'has another value' if key in metadata else 'is missing'} in the cloud"


def _compare(path: str, asked: Any, found: Any) -> Iterator[str]:
    if isinstance(asked, Mapping):
        other = found if isinstance(found, Mapping) else None
        if other is None:
            yield _describe(path, asked, found)
            return
        extra = {name for name, value in other.items() if value is True or path in {"tier", "queueing"}}
        for name in sorted(asked.keys() | extra):
            default = False if other.get(name) is True else None
            yield from _compare(f"{path}.{to_camel(name)}", asked.get(name, default), other.get(name))
    elif path.rpartition(".")[2] in {to_camel(name) for name in _PATHS}:
        if _last(asked) != _last(found):
            yield _describe(path, asked, found)
    elif path == "node.serviceAccount.scope":
        yield from _compare_lists(path, sorted(asked), sorted(found or ()))
    elif asked != found:
        yield _describe(path, asked, found)


def _compare_lists(path: str, asked: Any, found: Any) -> Iterator[str]:
    if list(asked) != list(found):
        yield _describe(path, ", ".join(asked) or None, ", ".join(found) or None)


def _compare_disks(asked: Any, found: Any) -> Iterator[str]:
    wanted = [f"{disk['source_disk']} ({disk['mode']})" for disk in asked]
    present = [f"{disk.get('source_disk')} ({disk.get('mode', 'READ_WRITE')})" for disk in found]
    yield from _compare_lists("node.dataDisks", sorted(wanted), sorted(present))


def _compare_reservation(asked: CloudRequest, found: CloudQueuedResource) -> Iterator[str]:
    if _last(asked.reservation_name) != _last(found.reservation_name):
        yield _describe("reservationName", asked.reservation_name, found.reservation_name)


def _last(path: Any) -> str:
    return str(path or "").rpartition("/")[2]


def _describe(path: str, asked: Any, found: Any) -> str:
    return f"{path}: asked for {_show(asked)}, the cloud has {_show(found)}"


def _show(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)[:_LIMIT]
