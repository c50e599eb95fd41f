"""Define QueuedResource, a user's request for TPU VMs. Its status is in `queuedresource_status`.

Field docstrings become the descriptions in the CRD. The rules that a schema can't express are in
`queuedresource_rules`.
"""

from enum import StrEnum
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field
from typing_extensions import override

from stepkeeper_operator.api.base import ApiModel, ObjectMeta, SpecPart, Timestamp
from stepkeeper_operator.api.v1alpha1.queuedresource_slices import SlicesSpec
from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceStatus

__all__ = [
    "KIND",
    "SHORT_NAMES",
    "DeletionPolicy",
    "GuaranteedTier",
    "OnEnd",
    "PlainTier",
    "QueuedResource",
    "QueuedResourceSpec",
    "QueueingSpec",
    "RecreateBackoff",
    "RecreatePolicy",
    "TierSpec",
    "UpdatePolicy",
    "choose_autocheckpoint",
]

KIND: Final = "QueuedResource"
SHORT_NAMES: Final = ("qr",)

Seconds = Annotated[int, Field(ge=60, le=31_536_000)]


class OnEnd(StrEnum):
    """The reaction to a cloud resource that can't become active again."""

    RECREATE = "Recreate"
    KEEP = "Keep"


class DeletionPolicy(StrEnum):
    DELETE = "Delete"
    RETAIN = "Retain"


class UpdatePolicy(StrEnum):
    REFUSE = "Refuse"
    RECREATE = "Recreate"


class GuaranteedTier(SpecPart):
    reserved: bool = False
    """Take the machines from a reservation."""

    min_duration_seconds: Seconds | None = None
    """Minimum time for which the machines have to be available when they are granted."""


class PlainTier(SpecPart):
    """A tier that has no fields."""


class TierSpec(SpecPart):
    """Terms on which the machines are bought: exactly one of guaranteed, spot and bestEffort."""

    union: ClassVar = ("guaranteed", "spot", "bestEffort")

    guaranteed: GuaranteedTier | None = None
    """Machines that aren't preempted for other requests. Write guaranteed: {} for the defaults of its fields."""

    spot: PlainTier | None = None
    """Machines that the cloud can preempt at any time. Write spot: {}."""

    best_effort: PlainTier | None = None
    """Machines that guaranteed requests have priority for. Write bestEffort: {}."""


class QueueingSpec(SpecPart):
    """Limits of the time that the request waits: validUntilSeconds, or the others. The operator deletes an expired
    request from the cloud.
    """

    union: ClassVar = ("validUntilSeconds", "validUntilTime", "validAfterTime")
    several: ClassVar = True

    valid_until_seconds: Seconds | None = None
    """Wait at most this long, from the creation of the request."""

    valid_until_time: Timestamp | None = None
    """Wait until this time."""

    valid_after_time: Timestamp | None = None
    """Don't grant the request before this time."""

    @override
    def needs_member(self) -> bool:
        return bool(self.model_extra)  # an unknown limit is not the same as none


class RecreateBackoff(SpecPart):
    """Wait before a recreation. It doubles each time, and starts over once a resource has been active for an hour."""

    initial_seconds: Annotated[int, Field(ge=0, le=86_400)] = 30
    """First wait."""

    max_seconds: Annotated[int, Field(ge=0, le=86_400)] = 1800
    """Longest wait."""


class RecreatePolicy(SpecPart):
    """Reaction to a cloud resource that can't become active again. It is deleted before the next one is requested,
    because it uses quota until then.
    """

    on_suspended: OnEnd = OnEnd.RECREATE
    """Reaction if the cloud has suspended the resource, or has preempted one of its machines."""

    on_failed: OnEnd = OnEnd.RECREATE
    """Reaction if the cloud could not provide the resource, or the request has expired. A failure for lack of quota is
    always retried."""

    backoff: RecreateBackoff = RecreateBackoff()
    """Wait before each recreation. It doubles each time, up to maxSeconds, and starts over once a resource has been
    active for an hour."""

    max: Annotated[int, Field(ge=0, le=100_000)] | None = None
    """Maximum number of consecutive recreations without an hour of being active in between. After that, the resource is
    left as it is. Unset: no limit."""


class QueuedResourceSpec(SpecPart):
    compared: ClassVar = ("slices", "tier", "reservationName", "queueing")

    project: Annotated[str, Field(min_length=6, max_length=63)]
    """Id of the Google Cloud project, not its number. It can't be changed while there is a cloud resource."""

    zone: Annotated[str, Field(min_length=5, max_length=32)]
    """Zone of the machines, for example us-central2-b. It can't be changed while there is a cloud resource."""

    slices: SlicesSpec
    """The TPU slices that are requested."""

    tier: TierSpec
    """How the machines are bought: exactly one of guaranteed, spot and bestEffort."""

    reservation_name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Reservation that the machines come from: the name of one in this project and zone, or the path of a shared one,
    projects/<project>/locations/<zone>/reservations/<name>. Set it only with tier guaranteed {reserved: true}."""

    queueing: QueueingSpec | None = None
    """How long the request waits. Unset: until it is granted."""

    recreate_policy: RecreatePolicy = RecreatePolicy()
    """Reaction to a cloud resource that can't become active again."""

    update_policy: UpdatePolicy = UpdatePolicy.REFUSE
    """Reaction to a change of slices, tier, reservationName or queueing, which the cloud can't change on an existing
    resource. While there is none (state Pending or Gone), each change is accepted. Refuse: the API server rejects the
    change. Recreate: the operator deletes the cloud resource and creates
    it again; jobs on it save, wait, and resume."""

    deletion_policy: DeletionPolicy = DeletionPolicy.DELETE
    """What to do with the cloud resource when this object is deleted. Delete: delete it and its machines. Retain: keep
    both; they continue to cost money."""

    join_timeout_seconds: Annotated[int, Field(ge=60, le=86_400)] = 900
    """Time for all hosts to join the cluster, from when the resource becomes active or a host goes missing."""

    @property
    def autocheckpoint(self) -> bool:
        """The setting in the request to the cloud."""
        guaranteed = self.tier.guaranteed is not None
        return choose_autocheckpoint(self.slices.autocheckpoint_enabled, guaranteed=guaranteed)


def choose_autocheckpoint(setting: bool | None, *, guaranteed: bool) -> bool:
    """Return the user's setting, or the default: on if the machines are guaranteed."""
    return guaranteed if setting is None else setting


class QueuedResource(ApiModel):
    """Cloud TPU VMs, requested through the Cloud TPU queue, that join this cluster as nodes."""

    api_version: Literal["stepkeeper.dev/v1alpha1"] = "stepkeeper.dev/v1alpha1"
    kind: Literal["QueuedResource"] = "QueuedResource"
    metadata: ObjectMeta
    spec: QueuedResourceSpec
    """The machines that the user requests."""

    status: QueuedResourceStatus = QueuedResourceStatus()
    """The observed state of the request, mirrored from the cloud."""
