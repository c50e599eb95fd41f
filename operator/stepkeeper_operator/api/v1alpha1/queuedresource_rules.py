"""List the CEL rules of a QueuedResource that a schema can't express.

Patterns are rules too, so that their messages say what to write instead. A rule that reads `oldSelf` is checked when
an object is changed.
"""

from typing import Final

from stepkeeper_operator.api.accelerators import SHAPES_OF_TWO_SIDES, SMALL_SHAPES_OF_THREE_SIDES
from stepkeeper_operator.api.cel import CUBIC_TOPOLOGY, CelRule, cel_list
from stepkeeper_operator.api.v1alpha1.queuedresource_node import AcceleratorGeneration

__all__ = ["NAME_MESSAGE", "NAME_PATTERN", "RULES"]

NAME_PATTERN: Final = "^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$"
"""Names of QueuedResources. They are part of ids in the cloud, which have at most 63 characters."""

NAME_MESSAGE: Final = (
    "use 1 to 40 lower-case letters, digits and '-', beginning with a letter and not ending with '-'; ids in the cloud"
    " and labels of nodes are made from it"
)
_RESERVED_PREFIX: Final = "stepkeeper-"
"""Beginning of the labels and metadata keys that the operator sets on cloud nodes."""

_GENERATIONS: Final = tuple(generation.value for generation in AcceleratorGeneration)
_FLAT: Final = ("V5LITE_POD", "V6E")
_OLD: Final = ("V2", "V3")
_OLD_SHAPES: Final = ("2x2", "4x4", "4x8", "8x8", "8x16", "16x16", "16x32", "32x32")
_CUBIC: Final = ("V4", "V5P")
_IRONWOOD: Final = "v7|tpu-?7|ironwood"
"""Matches the names, in lower case, of a generation that the Cloud TPU API doesn't have."""

_IRONWOOD_MESSAGE: Final = (
    "Ironwood (v7x, tpu7x) isn't in the Cloud TPU API: only GKE has it; there, make a TPU node pool, and run"
    " the job on it by spec.placement.tpu {accelerator: v7x, topology} without a QueuedResource"
)


def _pattern(at: str, pattern: str, message: str) -> CelRule:
    """Make the rule that the string at `at` matches `pattern`."""
    return CelRule(at=at, cel=f"self.matches('{pattern}')", message=f"{at.rpartition('.')[2]}: {message}")


def _fixed(field: str, *, optional: bool) -> CelRule:
    """Make the rule that a field of spec changes only where the cloud resource may be recreated."""
    same = f"self.{field} == oldSelf.{field}"
    if optional:  # the API server can't bound the cost of self.?field == oldSelf.?field
        same = f"has(self.{field}) == has(oldSelf.{field}) && (!has(self.{field}) || {same})"
    return CelRule(
        at="spec",
        cel=f"self.updatePolicy == 'Recreate' || ({same})",
        message=f"{field}: the cloud can't change it on a live resource; set updatePolicy: Recreate to have the"
        " resource recreated (jobs on it save, wait and resume), or make another QueuedResource",
    )


_PLACE: Final = (
    CelRule(
        at="",
        cel=f"self.metadata.name.matches('{NAME_PATTERN}')",
        message=f"metadata.name: {NAME_MESSAGE}",
    ),
    _pattern(
        "spec.project",
        "^([a-z0-9][-a-z0-9.]*[.][a-z]+:)?[a-z][-a-z0-9]{4,28}[a-z0-9]$",
        "write the project's id: 6 to 30 lower-case letters, digits and '-', beginning with a letter; its number or its"
        " display name won't do",
    ),
    _pattern(
        "spec.zone",
        "^[a-z]+-[a-z]+[0-9]+-(ai[0-9]+)?[a-z]$",
        "write a zone, for example us-central2-b; a region won't do",
    ),
)

_ACCELERATOR: Final = (
    CelRule(
        at="spec.node",
        cel="has(self.acceleratorType) != has(self.acceleratorConfig)",
        message="give exactly one of acceleratorType: v5litepod-16 and acceleratorConfig: {type: V5LITE_POD, topology:"
        " 4x4}",
    ),
    CelRule(
        at="spec.node.acceleratorType",
        cel=f"!self.lowerAscii().matches('{_IRONWOOD}')",
        message=f"acceleratorType: {_IRONWOOD_MESSAGE}",
    ),
    CelRule(
        at="spec.node.acceleratorType",
        cel=f"self.matches('^v(2|3|4|5litepod|5p|6e)-[1-9][0-9]{{0,4}}$') || self.lowerAscii().matches('{_IRONWOOD}')",
        message="acceleratorType: write v2, v3, v4, v5litepod (which is v5e), v5p or v6e, a '-' and the size, for"
        " example v5litepod-16",
    ),
    CelRule(
        at="spec.node.acceleratorConfig.type",
        cel=f"!self.lowerAscii().matches('{_IRONWOOD}')",
        message=f"type: {_IRONWOOD_MESSAGE}",
    ),
    CelRule(
        at="spec.node.acceleratorConfig.type",
        cel=f"self in {cel_list(_GENERATIONS)} || self.lowerAscii().matches('{_IRONWOOD}')",
        message=f"type: use one of {', '.join(_GENERATIONS)}; V5LITE_POD is v5e",
    ),
    CelRule(
        at="spec.node.acceleratorConfig",
        cel=f"!(self.type in {cel_list(_FLAT)}) || self.topology in {cel_list(SHAPES_OF_TWO_SIDES)}",
        message=f"topology: {' and '.join(_FLAT)} have two sides: use one of {', '.join(SHAPES_OF_TWO_SIDES)}",
    ),
    CelRule(
        at="spec.node.acceleratorConfig",
        cel=f"!(self.type in {cel_list(_OLD)}) || self.topology in {cel_list(_OLD_SHAPES)}",
        message=f"topology: {' and '.join(_OLD)} have two sides: use one of {', '.join(_OLD_SHAPES)}",
    ),
    CelRule(
        at="spec.node.acceleratorConfig",
        cel=f"!(self.type in {cel_list(_CUBIC)}) || self.topology in {cel_list(SMALL_SHAPES_OF_THREE_SIDES)}"
        f" || {CUBIC_TOPOLOGY}",
        message=f"topology: {' and '.join(_CUBIC)} have three sides: use {', '.join(SMALL_SHAPES_OF_THREE_SIDES)}, or"
        " multiples of 4 in ascending order like 4x4x8",
    ),
)

_HOSTS: Final = (
    _pattern(
        "spec.node.runtimeVersion",
        "^[a-zA-Z0-9]([-_.a-zA-Z0-9]*[a-zA-Z0-9])?$",
        "write the name of a TPU software version, for example tpu-ubuntu2204-base",
    ),
    _pattern(
        "spec.node.idPrefix",
        "^[a-z]([-a-z0-9]*[a-z0-9])?$",
        "use lower-case letters, digits and '-', beginning with a letter and not ending with '-'",
    ),
    _pattern(
        "spec.node.network.network",
        "^([-a-z0-9.:]+/)*[a-z]([-a-z0-9]*[a-z0-9])?$",
        "write a name, or a path like projects/<project>/global/networks/<name>",
    ),
    _pattern(
        "spec.node.network.subnetwork",
        "^([-a-z0-9.:]+/)*[a-z]([-a-z0-9]*[a-z0-9])?$",
        "write a name, or a path like projects/<project>/regions/<region>/subnetworks/<name>",
    ),
    _pattern(
        "spec.node.serviceAccount.email",
        "^[a-z0-9][-a-z0-9]*@([-a-z0-9]+[.])+gserviceaccount[.]com$",
        "write the email of a service account, for example tpu@my-project.iam.gserviceaccount.com",
    ),
    CelRule(
        at="spec.node.serviceAccount.scopes",
        cel="self.all(scope, scope.matches('^https://www[.]googleapis[.]com/auth/[-a-z0-9._/]+$'))",
        message="scopes: write whole addresses, for example https://www.googleapis.com/auth/cloud-platform",
    ),
    CelRule(
        at="spec.node.tags",
        cel="self.all(tag, tag.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$'))",
        message="tags: use lower-case letters, digits and '-', beginning with a letter and not ending with '-'",
    ),
    CelRule(
        at="spec.node.labels",
        cel="self.all(key, key.matches('^[a-z][-_a-z0-9]{0,62}$'))",
        message="labels: a key has 1 to 63 lower-case letters, digits, '-' and '_', and begins with a letter",
    ),
    CelRule(
        at="spec.node.labels",
        cel="self.all(key, self[key].matches('^[-_a-z0-9]*$'))",
        message="labels: a value has lower-case letters, digits, '-' and '_'",
    ),
    CelRule(
        at="spec.node.labels",
        cel=f"self.all(key, !key.startsWith('{_RESERVED_PREFIX}'))",
        message=f"labels: keys that begin with {_RESERVED_PREFIX} are set by the operator; use another key",
    ),
)

_METADATA: Final = (
    CelRule(
        at="spec.node.metadata",
        cel="self.all(key, key.matches('^[-_a-zA-Z0-9]{1,128}$'))",
        message="metadata: a key has 1 to 128 letters, digits, '-' and '_'",
    ),
    CelRule(
        at="spec.node.metadata",
        cel=f"self.all(key, !key.startsWith('{_RESERVED_PREFIX}'))",
        message=f"metadata: keys that begin with {_RESERVED_PREFIX} are set by the operator; use another key",
    ),
    CelRule(
        at="spec.node",
        cel="!has(self.startupScriptSecretRef) || !has(self.metadata) || !('startup-script' in self.metadata)",
        message="metadata: startup-script and startupScriptSecretRef are two ways to give one script; leave one out",
    ),
    _pattern(
        "spec.node.startupScriptSecretRef.name",
        "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$",
        "write the name of a Secret in this namespace",
    ),
    _pattern(
        "spec.node.startupScriptSecretRef.key",
        "^[-._a-zA-Z0-9]+$",
        "a key of a Secret has letters, digits, '-', '_' and '.'",
    ),
)

_DISKS: Final = (
    CelRule(
        at="spec.node.dataDisks",
        cel="self.all(disk, disk.sourceDisk.matches('^projects/[-a-z0-9.:]+/zones/[-a-z0-9]+/disks/[-a-z0-9]+$'))",
        message="dataDisks: write sourceDisk as projects/<project>/zones/<zone>/disks/<disk>",
    ),
    CelRule(
        at="spec",
        cel="!has(self.node.dataDisks)"
        " || self.node.dataDisks.all(disk, !disk.sourceDisk.contains('/zones/')"
        " || disk.sourceDisk.contains('/zones/' + self.zone + '/'))",
        message="dataDisks: a disk is in another zone than the machines; use disks of spec.zone",
    ),
    CelRule(
        at="spec.node",
        cel="self.count == 1 || !has(self.dataDisks) || self.dataDisks.all(disk, disk.mode == 'ReadOnly')",
        message="dataDisks: only one slice can write to a disk; use mode: ReadOnly, or count: 1",
    ),
)

_TERMS: Final = (
    CelRule(
        at="spec.tier",
        cel="[has(self.guaranteed), has(self.spot), has(self.bestEffort)].exists_one(given, given)",
        message="tier: give exactly one of guaranteed: {}, spot: {} and bestEffort: {}",
    ),
    CelRule(
        at="spec.queueing",
        cel="[has(self.validUntilSeconds), has(self.validUntilTime), has(self.validAfterSeconds),"
        " has(self.validAfterTime), has(self.validInterval)].filter(given, given).size() <= 1",
        message="queueing: give at most one of validUntilSeconds, validUntilTime, validAfterSeconds, validAfterTime and"
        " validInterval",
    ),
    CelRule(
        at="spec.queueing.validInterval",
        cel="self.startTime < self.endTime",
        message="validInterval: endTime is not after startTime; use a later endTime",
    ),
    CelRule(
        at="spec",
        cel="!has(self.reservationName) || (has(self.tier.guaranteed) && self.tier.guaranteed.reserved)",
        message="reservationName: goes with tier: {guaranteed: {reserved: true}}; set that, or leave reservationName"
        " out",
    ),
    CelRule(
        at="spec",
        cel="!has(self.reservationName) || self.reservationName.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')"
        " || (self.reservationName.matches("
        "'^projects/[-a-z0-9.:]+/locations/[-a-z0-9]+/reservations/[a-z]([-a-z0-9]*[a-z0-9])?$')"
        " && self.reservationName.contains('/locations/' + self.zone + '/'))",
        message="reservationName: write the name of a reservation of this project and zone, or the path of a shared one"
        " of this zone, projects/<project>/locations/<zone>/reservations/<name>",
    ),
    CelRule(
        at="spec.recreatePolicy.backoff",
        cel="self.initialSeconds <= self.maxSeconds",
        message="backoff: initialSeconds is greater than maxSeconds; use a greater maxSeconds",
    ),
)

_CHANGES: Final = (
    CelRule(
        at="spec",
        cel="self.project == oldSelf.project && self.zone == oldSelf.zone",
        message="project and zone: a resource can't move; make another QueuedResource there, name it in the jobs, and"
        " delete this one",
    ),
    _fixed("node", optional=False),
    _fixed("tier", optional=False),
    _fixed("reservationName", optional=True),
    _fixed("queueing", optional=True),
)

RULES: Final = _PLACE + _ACCELERATOR + _HOSTS + _METADATA + _DISKS + _TERMS + _CHANGES
