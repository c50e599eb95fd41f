"""List the CEL rules of a QueuedResource that a schema can't express.

Patterns are rules too, so that their messages can explain the valid form. A rule that reads `oldSelf` is checked when
an object is changed.
"""

from typing import Final

from stepkeeper_operator.api.accelerators import topology_rules
from stepkeeper_operator.api.cel import CelRule

__all__ = ["NAME_MESSAGE", "NAME_PATTERN", "RULES"]

NAME_PATTERN: Final = "^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$"
"""Names of QueuedResources. They are part of cloud ids, which have at most 63 characters."""

NAME_MESSAGE: Final = (
    "use 1 to 40 lower-case letters, digits and '-', beginning with a letter and not ending with '-'; ids in the cloud"
    " and labels of nodes are made from it"
)
_RESERVED_PREFIX: Final = "stepkeeper-"
"""Prefix of the labels and metadata keys that the operator sets in the cloud."""


def _pattern(at: str, pattern: str, message: str) -> CelRule:
    """Make the rule that the string at `at` matches `pattern`."""
    return CelRule(at=at, cel=f"self.matches('{pattern}')", message=f"{at.rpartition('.')[2]}: {message}")


_NOTHING_IN_CLOUD: Final = (
    "!has(self.status) || !has(self.status.state) || self.status.state in ['Pending', 'Gone']"
)
"""CEL: there is no cloud resource, by the status that the API server has. Changes of the spec don't change it."""


def _fixed(field: str, *, optional: bool) -> CelRule:
    """Make the rule that a field of spec changes only without a cloud resource, or if that may be recreated."""
    same = f"self.spec.{field} == oldSelf.spec.{field}"
    if optional:  # the API server can't bound the cost of self.?field == oldSelf.?field
        same = f"has(self.spec.{field}) == has(oldSelf.spec.{field}) && (!has(self.spec.{field}) || {same})"
    return CelRule(
        at="",
        cel=f"self.spec.updatePolicy == 'Recreate' || {_NOTHING_IN_CLOUD} || ({same})",
        message=f"{field}: the cloud can't change it on an existing resource; set updatePolicy: Recreate to have the"
        " resource recreated (jobs on it save, wait and resume), or create another QueuedResource",
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
        "use the project's id: 6 to 30 lower-case letters, digits and '-', beginning with a letter; not its number or"
        " display name",
    ),
    _pattern(
        "spec.zone",
        "^[a-z]+-[a-z]+[0-9]+-(ai[0-9]+)?[a-z]$",
        "use a zone, for example us-central2-b; not a region",
    ),
)

_ACCELERATOR: Final = (
    CelRule(
        at="spec.slices.accelerator",
        cel="self != 'v7x'",
        message="accelerator: there are no queued resources of v7x, which only GKE has; create a TPU node pool there,"
        " and set accelerator: v7x in spec.placement.tpu of the job",
    ),
    *topology_rules("spec.slices"),
)

_HOSTS: Final = (
    _pattern(
        "spec.slices.image",
        "^[a-zA-Z0-9]([-_.a-zA-Z0-9]*[a-zA-Z0-9])?$",
        "use the name of a TPU software version, for example tpu-ubuntu2204-base",
    ),
    _pattern(
        "spec.slices.namePrefix",
        "^[a-z]([-a-z0-9]*[a-z0-9])?$",
        "use lower-case letters, digits and '-', beginning with a letter and not ending with '-'",
    ),
    _pattern(
        "spec.slices.network.network",
        "^([-a-z0-9.:]+/)*[a-z]([-a-z0-9]*[a-z0-9])?$",
        "use a name, or a path like projects/<project>/global/networks/<name>",
    ),
    _pattern(
        "spec.slices.network.subnetwork",
        "^([-a-z0-9.:]+/)*[a-z]([-a-z0-9]*[a-z0-9])?$",
        "use a name, or a path like projects/<project>/regions/<region>/subnetworks/<name>",
    ),
    _pattern(
        "spec.slices.serviceAccount.email",
        "^[a-z0-9][-a-z0-9]*@([-a-z0-9]+[.])+gserviceaccount[.]com$",
        "use the email of a service account, for example tpu@my-project.iam.gserviceaccount.com",
    ),
    CelRule(
        at="spec.slices.serviceAccount.scopes",
        cel="self.all(scope, scope.matches('^https://www[.]googleapis[.]com/auth/[-a-z0-9._/]+$'))",
        message="scopes: use full URLs, for example https://www.googleapis.com/auth/cloud-platform",
    ),
    CelRule(
        at="spec.slices.tags",
        cel="self.all(tag, tag.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$'))",
        message="tags: use lower-case letters, digits and '-', beginning with a letter and not ending with '-'",
    ),
    CelRule(
        at="spec.slices.labels",
        cel="self.all(key, key.matches('^[a-z][-_a-z0-9]{0,62}$'))",
        message="labels: a key has 1 to 63 lower-case letters, digits, '-' and '_', and begins with a letter",
    ),
    CelRule(
        at="spec.slices.labels",
        cel="self.all(key, self[key].matches('^[-_a-z0-9]*$'))",
        message="labels: a value has lower-case letters, digits, '-' and '_'",
    ),
    *(
        CelRule(
            at=f"spec.slices.{field}",
            cel=f"self.all(key, !key.startsWith('{_RESERVED_PREFIX}'))",
            message=f"{field}: keys that begin with {_RESERVED_PREFIX} are set by the operator; use another key",
        )
        for field in ("labels", "metadata")
    ),
)

_METADATA: Final = (
    CelRule(
        at="spec.slices.metadata",
        cel="self.all(key, key.matches('^[-_a-zA-Z0-9]{1,128}$'))",
        message="metadata: a key has 1 to 128 letters, digits, '-' and '_'",
    ),
    CelRule(
        at="spec.slices",
        cel="!has(self.startupScriptSecretRef) || !has(self.metadata) || !('startup-script' in self.metadata)",
        message="metadata: startup-script and startupScriptSecretRef both set the startup script; remove one",
    ),
    _pattern(
        "spec.slices.startupScriptSecretRef.name",
        "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$",
        "use the name of a Secret in this namespace",
    ),
    _pattern(
        "spec.slices.startupScriptSecretRef.key",
        "^[-._a-zA-Z0-9]+$",
        "a key of a Secret has letters, digits, '-', '_' and '.'",
    ),
)

_DISKS: Final = (
    CelRule(
        at="spec.slices.dataDisks",
        cel="self.all(disk, disk.sourceDisk.matches('^projects/[-a-z0-9.:]+/zones/[-a-z0-9]+/disks/[-a-z0-9]+$'))",
        message="dataDisks: use the form projects/<project>/zones/<zone>/disks/<disk> for sourceDisk",
    ),
    CelRule(
        at="spec",
        cel="!has(self.slices.dataDisks)"
        " || self.slices.dataDisks.all(disk, !disk.sourceDisk.contains('/zones/')"
        " || disk.sourceDisk.contains('/zones/' + self.zone + '/'))",
        message="dataDisks: a disk is not in the zone of the machines; use disks in spec.zone",
    ),
    CelRule(
        at="spec.slices",
        cel="self.count == 1 || !has(self.dataDisks) || self.dataDisks.all(disk, disk.mode == 'ReadOnly')",
        message="dataDisks: only one slice can write to a disk; use mode: ReadOnly, or count: 1",
    ),
)

_TERMS: Final = (
    CelRule(
        at="spec.tier",
        cel="[has(self.guaranteed), has(self.spot), has(self.bestEffort)].exists_one(given, given)",
        message="tier: set exactly one of guaranteed: {}, spot: {} and bestEffort: {}",
    ),
    CelRule(
        at="spec.queueing",
        cel="!has(self.validUntilSeconds) || (!has(self.validUntilTime) && !has(self.validAfterTime))",
        message="queueing: set validUntilSeconds, or validAfterTime and validUntilTime, not both",
    ),
    CelRule(
        at="spec.queueing",
        cel="!has(self.validUntilTime) || !has(self.validAfterTime) || self.validAfterTime < self.validUntilTime",
        message="queueing: validUntilTime is not after validAfterTime; use a later validUntilTime",
    ),
    CelRule(
        at="spec",
        cel="!has(self.reservationName) || (has(self.tier.guaranteed) && self.tier.guaranteed.reserved)",
        message="reservationName: requires tier: {guaranteed: {reserved: true}}; set that, or remove reservationName",
    ),
    CelRule(
        at="spec",
        cel="!has(self.reservationName) || self.reservationName.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')"
        " || (self.reservationName.matches("
        "'^projects/[-a-z0-9.:]+/locations/[-a-z0-9]+/reservations/[a-z]([-a-z0-9]*[a-z0-9])?$')"
        " && self.reservationName.contains('/locations/' + self.zone + '/'))",
        message="reservationName: use the name of a reservation of this project and zone, or the path of a shared one"
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
        at="",
        cel=f"{_NOTHING_IN_CLOUD}"
        " || (self.spec.project == oldSelf.spec.project && self.spec.zone == oldSelf.spec.zone)",
        message="project and zone: a resource can't move; create another QueuedResource there, name it in the jobs, and"
        " delete this one",
    ),
    _fixed("slices", optional=False),
    _fixed("tier", optional=False),
    _fixed("reservationName", optional=True),
    _fixed("queueing", optional=True),
)

RULES: Final = _PLACE + _ACCELERATOR + _HOSTS + _METADATA + _DISKS + _TERMS + _CHANGES
