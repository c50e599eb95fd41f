"""What the documentation demands of a Node in a request."""

import ipaddress
import re
from collections.abc import Mapping

from tpuapi.core import accelerators
from tpuapi.core.accelerators import Accelerator
from tpuapi.core.errors import invalid
from tpuapi.core.values import Json
from tpuapi.core.world import World

OUTPUT_ONLY = (
    "name",
    "state",
    "health_description",
    "create_time",
    "network_endpoints",
    "id",
    "api_version",
    "symptoms",
    "queued_resource",
    "multislice_node",
    "upcoming_maintenance",
    "health",
)
"""What the service sets: ignored in requests. Health isn't marked so, but is the Health Monitor's."""

MAX_DESCRIPTION = 512
MAX_LABELS = 64
MAX_METADATA_VALUE_BYTES = 256 * 1024
MAX_METADATA_BYTES = 512 * 1024
CIDR_PREFIX = 29
READ_WRITE = "READ_WRITE"
"""The mode of disks for which none is given."""

_LABEL_KEY = re.compile(r"[a-z][a-z0-9_-]{0,62}")
_LABEL_VALUE = re.compile(r"[a-z0-9_-]{0,63}")
_TAG = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
_DISK = re.compile(r"projects/[^/]+/(zones|regions)/[^/]+/disks/[^/]+")


def read_node(world: World, body: Json, field: str, n_nodes: int = 1) -> tuple[Json, Accelerator]:
    """Check a node, and return it without what only the service sets, with its accelerator.

    Args:
        world: For the runtime versions and the nodes that there are.
        body: The Node.
        field: The path of the node in the request, for messages.
        n_nodes: How many such nodes are asked for.

    Raises:
        ApiError: It breaks a rule; INVALID_ARGUMENT.
    """
    if not body.get("runtime_version"):
        raise invalid(f"{field}.runtime_version", "the runtime version is required")
    if world.runtime_versions and body["runtime_version"] not in world.runtime_versions:
        raise invalid(f"{field}.runtime_version", f"'{body['runtime_version']}' is no known runtime version")
    if len(body.get("description", "")) > MAX_DESCRIPTION:
        raise invalid(f"{field}.description", f"more than {MAX_DESCRIPTION} characters")
    check_labels(body.get("labels", {}), f"{field}.labels")
    check_metadata(body.get("metadata", {}), f"{field}.metadata")
    check_tags(body.get("tags", ()), f"{field}.tags")
    _check_networks(world, body, field)
    _check_disks(world, body, field, n_nodes)
    accelerator = _read_accelerator(body, field)
    return {key: value for key, value in body.items() if key not in OUTPUT_ONLY}, accelerator


def check_labels(labels: Mapping[str, str], field: str) -> None:
    """Hold labels to the form that labels have on all of Google Cloud."""
    if len(labels) > MAX_LABELS:
        raise invalid(field, f"more than {MAX_LABELS} labels")
    for key, value in labels.items():
        if _LABEL_KEY.fullmatch(key) is None:
            raise invalid(
                field,
                f"key '{key}' is not a lower-case letter followed by up to 62 lower-case letters, "
                "digits, underscores or dashes",
            )
        if _LABEL_VALUE.fullmatch(value) is None:
            raise invalid(
                field,
                f"value '{value}' of '{key}' is not up to 63 lower-case letters, digits, underscores or dashes",
            )


def check_metadata(metadata: Mapping[str, str], field: str) -> None:
    """Hold metadata to Compute Engine's limits of size."""
    sizes = {key: len(value.encode()) for key, value in metadata.items()}
    for key, size in sizes.items():
        if size > MAX_METADATA_VALUE_BYTES:
            raise invalid(field, f"value of '{key}' has more than {MAX_METADATA_VALUE_BYTES} bytes")
    if sum(sizes.values()) + sum(len(key) for key in sizes) > MAX_METADATA_BYTES:
        raise invalid(field, f"more than {MAX_METADATA_BYTES} bytes in all")


def check_tags(tags: tuple[str, ...], field: str) -> None:
    for tag in tags:
        if _TAG.fullmatch(tag) is None:
            raise invalid(field, f"'{tag}' is no network tag (RFC 1035)")


def _check_networks(world: World, body: Json, field: str) -> None:
    if "network_config" in body and body.get("network_configs"):
        raise invalid(f"{field}.network_configs", "network_config and network_configs are mutually exclusive")
    cidr = body.get("cidr_block", "")
    if not cidr:
        return
    try:
        block = ipaddress.ip_network(cidr)
    except ValueError:
        raise invalid(f"{field}.cidr_block", f"'{cidr}' is no CIDR block") from None
    if block.prefixlen != CIDR_PREFIX:
        raise invalid(f"{field}.cidr_block", f"'{cidr}' is not a /{CIDR_PREFIX} block")
    for node in world.nodes.values():
        if node.body.get("cidr_block") == cidr:
            raise invalid(f"{field}.cidr_block", f"'{cidr}' is already used by {node.name}")


def _check_disks(world: World, body: Json, field: str, n_nodes: int) -> None:
    attached = {
        disk["source_disk"]: disk.get("mode", READ_WRITE)
        for node in world.nodes.values()
        for disk in node.body.get("data_disks", ())
    }
    for index, disk in enumerate(body.get("data_disks", ())):
        path, mode = disk.get("source_disk", ""), disk.get("mode", READ_WRITE)
        if _DISK.fullmatch(path) is None:
            raise invalid(
                f"{field}.data_disks[{index}].source_disk",
                "the full path of an existing disk is required, such as projects/p/zones/z/disks/d",
            )
        alone = n_nodes == 1 and path not in attached
        if READ_WRITE in (mode, attached.get(path)) and not alone:
            raise invalid(
                f"{field}.data_disks[{index}].mode",
                f"only one TPU node can attach '{path}' in read-write mode at a time",
            )


def _read_accelerator(body: Json, field: str) -> Accelerator:
    accelerator_type = body.get("accelerator_type", "")
    config = body.get("accelerator_config")
    if accelerator_type and config is not None:
        raise invalid(f"{field}.accelerator_config", "accelerator_type is given too: only one of them may be")
    if config is not None:
        return accelerators.from_config(
            config.get("type_", ""), config.get("topology", ""), f"{field}.accelerator_config"
        )
    if not accelerator_type:
        raise invalid(f"{field}.accelerator_type", "accelerator_type or accelerator_config is required")
    return accelerators.from_type(accelerator_type, f"{field}.accelerator_type")
