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
    """The reaction to a cloud resource that will never be active again."""

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
    """Take them from a reservation."""

    min_duration_seconds: Seconds | None = None
    """Least time for which the machines have to be free when they are granted."""


class PlainTier(SpecPart):
    """A tier that has no fields."""


class TierSpec(SpecPart):
    """Way in which the machines are bought: exactly one of guaranteed, spot and bestEffort."""

    union: ClassVar = ("guaranteed", "spot", "bestEffort")

    guaranteed: GuaranteedTier | None = None
    """Machines that aren't taken away for others. Write guaranteed: {} to leave its fields at their defaults."""

    spot: PlainTier | None = None
    """Machines that the cloud can take away at any time. Write spot: {}."""

    best_effort: PlainTier | None = None
    """Machines that are given to guaranteed requests first. Write bestEffort: {}."""


class QueueingSpec(SpecPart):
    """Limits of the time that the request waits: validUntilSeconds, or the others. The operator removes a request
    that has run out from the cloud.
    """

    union: ClassVar = ("validUntilSeconds", "validUntilTime", "validAfterTime")
    several: ClassVar = True

    valid_until_seconds: Seconds | None = None
    """Wait at most this long, from the creation of the request."""

    valid_until_time: Timestamp | None = None
    """Wait until then."""

    valid_after_time: Timestamp | None = None
    """Grant the request only from then on."""

    @override
    def needs_member(self) -> bool:
        return bool(self.model_extra)  # a limit that isn't known is not the same as none


class RecreateBackoff(SpecPart):
    """Wait before a cloud resource is recreated. The wait doubles each time, until one has been active for an hour."""

    initial_seconds: Annotated[int, Field(ge=0, le=86_400)] = 30
    """First wait."""

    max_seconds: Annotated[int, Field(ge=0, le=86_400)] = 1800
    """Longest wait."""


class RecreatePolicy(SpecPart):
    """Reaction to a cloud resource that will never be active again. What remains of it eats quota until it is
    deleted, and that happens first.
    """

    on_suspended: OnEnd = OnEnd.RECREATE
    """The cloud has suspended it, or a machine of it was preempted."""

    on_failed: OnEnd = OnEnd.RECREATE
    """The cloud could not provide it, or its request has run out. A failure for lack of quota is tried again anyway."""

    backoff: RecreateBackoff = RecreateBackoff()
    """Wait before each recreation. It doubles each time, up to maxSeconds, until one has been active for an hour."""

    max: Annotated[int, Field(ge=0, le=100_000)] | None = None
    """Recreations in a row without an hour of being active in between; then the resource stays as it is. Unset: no
    limit."""


class QueuedResourceSpec(SpecPart):
    compared: ClassVar = ("slices", "tier", "reservationName", "queueing")

    project: Annotated[str, Field(min_length=6, max_length=63)]
    """Google Cloud project, by its id and not by its number. It can't be changed."""

    zone: Annotated[str, Field(min_length=5, max_length=32)]
    """Zone of the machines: us-central2-b. It can't be changed."""

    slices: SlicesSpec
    """The TPU slices that are requested."""

    tier: TierSpec
    """How the machines are bought: exactly one of guaranteed, spot and bestEffort."""

    reservation_name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Reservation that the machines come from: the name of one of this project and zone, or the path of a shared one,
    projects/<project>/locations/<zone>/reservations/<name>. Set it only with tier guaranteed {reserved: true}."""

    queueing: QueueingSpec | None = None
    """How long the request waits. Unset: until it is granted."""

    recreate_policy: RecreatePolicy = RecreatePolicy()
    """What happens to a cloud resource that will never be active again."""

    update_policy: UpdatePolicy = UpdatePolicy.REFUSE
    """Reaction to a change of slices, tier, reservationName or queueing, which the cloud can't change on a live
    resource. Refuse: the API server refuses the change. Recreate: the operator deletes the cloud resource and creates
    it again; jobs on it save, wait, and resume."""

    deletion_policy: DeletionPolicy = DeletionPolicy.DELETE
    """With the deletion of this object, delete the cloud resource and its machines. Retain: leave both, and what they
    cost."""

    join_timeout_seconds: Annotated[int, Field(ge=60, le=86_400)] = 900
    """Time that all hosts have to join the cluster, from the moment that the resource is active or that one goes
    missing again."""

    @property
    def autocheckpoint(self) -> bool:
        """The setting that is asked of the cloud."""
        return choose_autocheckpoint(
            self.slices.autocheckpoint_enabled, guaranteed=self.tier.guaranteed is not None
        )


def choose_autocheckpoint(asked: bool | None, *, guaranteed: bool) -> bool:
    """Return the setting that the user asks for, or its default: on where machines are guaranteed."""
    return guaranteed if asked is None else asked


class QueuedResource(ApiModel):
    """Cloud TPU VMs, requested through the queue of Cloud TPU, that join this cluster as nodes."""

    api_version: Literal["stepkeeper.dev/v1alpha1"] = "stepkeeper.dev/v1alpha1"
    kind: Literal["QueuedResource"] = "QueuedResource"
    metadata: ObjectMeta
    spec: QueuedResourceSpec
    """The machines that the user asks for."""

    status: QueuedResourceStatus = QueuedResourceStatus()
    """The observed state of the request. The cloud is the truth; this is its mirror."""
