"""Define the input of a decision about one QueuedResource, besides the object itself."""

from dataclasses import dataclass
from enum import StrEnum

from stepkeeper_operator.cloud_tpu.cloud import CloudOperationState, CloudTPUError
from stepkeeper_operator.cloud_tpu.polling import Listing

__all__ = ["Member", "MemberPod", "Observed", "Outcome", "Refusal", "Verb"]


class Verb(StrEnum):
    """A request to the Cloud TPU API, by what it does."""

    LIST = "List"
    CREATE = "Create"
    DELETE = "Delete"
    LABEL = "Label"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The answer of an API server, or of its webhooks, that doesn't let the operator delete a node."""

    text: str
    at: float
    """Unix time."""

    count: int
    """Refusals in a row, this one included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A node of this cluster whose labels name the resource: a host of one of its cloud nodes."""

    name: str
    uid: str
    cloud_node: str = ""
    """Id of its cloud node, as its label says; empty: it has none."""

    addresses: tuple[str, ...] = ()
    """Internal addresses."""

    ready: bool = True
    cordoned: bool = False
    cordoned_by_us: bool = False
    """The operator has cordoned it, for the removal of this resource."""

    deletion_refusal: Refusal | None = None
    """Why the operator couldn't delete its Node object, whose machine is gone."""

    @property
    def joined(self) -> bool:
        """True if pods can come to it."""
        return self.ready and not self.cordoned


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberPod:
    """A pod on a member that has to end before the member's machine goes: no DaemonSet's, and not finished."""

    namespace: str
    name: str
    uid: str
    node: str
    stopping: bool = False
    """Its deletion was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The answer to a request of ours that the status doesn't tell of yet."""

    verb: Verb
    at: float
    """Unix time just before the request was sent."""

    operation: str = ""
    error: CloudTPUError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The cloud and the cluster around one QueuedResource at one moment."""

    cluster_id: str
    """Uid of namespace kube-system: the cluster's name in the cloud."""

    listing: Listing | None = None
    """The contents of its place in the cloud, asked for after our last request there. None: nobody can tell."""

    error: CloudTPUError | None = None
    """Why there is no listing."""

    listed_at: float = 0.0
    """Unix time of the last listing that this operator got for it, else of the operator's start."""

    operation: CloudOperationState | None = None
    """The operation that the status names; None: it wasn't looked at."""

    outcome: Outcome | None = None
    members: tuple[Member, ...] = ()
    cordon_refused_at: float | None = None
    """When the cordon of a member was last refused; None: not that this operator knows."""

    former: tuple[Member, ...] = ()
    """Nodes of this cluster that name objects which are gone, where this one has adopted machines."""

    other_uids: frozenset[str] = frozenset()
    """Uids of the other QueuedResources of this cluster, where this one is about to adopt something."""

    pods: tuple[MemberPod, ...] | None = None
    """The pods on the members; None: nobody has looked, for its machines aren't being removed."""

    script: str | None = None
    """The startup script, where the spec names one and it is about to be needed."""

    script_error: str = ""
    """Why there is no script."""
