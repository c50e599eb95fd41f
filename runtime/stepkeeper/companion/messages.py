"""Define the messages between a trainer and its companion. Requests are answered; the trainer's state is not."""

from dataclasses import dataclass
from enum import StrEnum

from stepkeeper.checkpoint.manifest import checkpoint_folder
from stepkeeper.checkpoint.orders import SaveOrder, Structure, ValueOrder
from stepkeeper.companion.reporter import ReportTarget
from stepkeeper.contract import Identity
from stepkeeper.log import Claim, CommitRecord, ForeignBase, ManifestRef
from stepkeeper.log.store_times import RestartHistory
from stepkeeper.policy.keep import Keep
from stepkeeper.stacks.reading import StackRequest
from stepkeeper.tier import TierPlace

__all__ = [
    "ClaimRequest",
    "ClaimedRoot",
    "CloseRequest",
    "CommitRequest",
    "Committed",
    "Kind",
    "OpenRequest",
    "QuarantineRequest",
    "Staged",
    "UploadRequest",
    "VerifiedNotice",
    "VoidRequest",
    "WriteRequest",
    "Written",
]


class Kind(StrEnum):
    """Names of the messages. Bodies are the classes below, such as `OpenRequest`. Comments name answers as (Class)."""

    OPEN = "open"  # with the file descriptors of its StackRequest
    CLAIM = "claim"  # (ClaimedRoot)
    WRITE = "write"  # with the file descriptors of the region and of the counter (Written)
    STAGE = "stage"  # a WriteRequest, with the same file descriptors (Staged)
    UPLOAD = "upload"  # with the counter's file descriptor (Written)
    COMMIT = "commit"  # (Committed)
    VOID = "void"
    QUARANTINE = "quarantine"  # (ClaimedRoot)
    VERIFIED = "verified"
    REFRESH = "refresh"  # without a body (ClaimedRoot)
    CLOSE = "close"
    STATE = "state"  # a TrainerState
    LINK = "link"  # the address at which rank 0's companion accepts the others' connections


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRequest:
    """Open a root for one rank. This is the first request to each companion."""

    rank: int
    world_size: int
    uri: str
    identity: Identity | None = None
    keep: Keep | None = None
    """The commits to keep; None: nothing is ever deleted."""

    tier: TierPlace | None = None
    """The local disk that stages saves; None writes them to the root directly."""

    unsafe_single_writer: bool = False

    report_target: ReportTarget | None = None
    report_interval_s: int = 10
    claim: Claim | None = None
    """The trainer's claim, if it has one, for a companion that replaces a lost one."""

    stacks: StackRequest | None = None
    """How to read the stacks of the trainer's threads; None: they aren't read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRequest:
    """Claim the root, and continue from a base."""

    base: int | None = None
    """Slot of the commit that this process restored; None continues from HEAD."""

    legacy: ForeignBase | None = None
    """Another writer's step that this process restored, or is about to restore."""

    branch: bool = False
    """True for no base: the next commit begins a branch."""

    offer: ForeignBase | None = None
    """Another writer's step to continue from if nothing is committed."""

    after: Claim | None = None
    """The trainer's present claim, which must still be the newest. It stays if HEAD is the requested base already."""

    nonce: str | None = None
    """Nonce of the claim's entry, by which a companion that replaces a lost one finds out whether the entry was put."""

    take_over: str | None = None
    """Name of the job whose root becomes this one's."""

    take_over_any: bool = False
    """True to take over the root of any job."""

    asks_past: bool = False
    """True to get this training's past (its restarts so far) in the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedRoot:
    """A claim and its base."""

    claim: Claim
    root: str
    """Id of the root, from its first entry."""

    tail: int
    """The log's last slot."""

    base: CommitRecord | None = None
    """The commit that the claim continues from, if any."""

    legacy: ForeignBase | None = None
    """The other writer's step that the claim continues from, if any."""

    branching: bool = False
    """True if the next commit begins a branch instead of continuing from the base."""

    past: RestartHistory | None = None
    """This training's past, if it was requested and the log could be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineRequest:
    """Quarantine a commit whose bytes are bad."""

    commit: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedNotice:
    """Note that all ranks have read this commit whole."""

    commit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRequest:
    """Write this rank's share of a save. Its bytes are in the region whose descriptor is sent along."""

    step: int
    claim: int
    """Slot of the claim."""

    nonce: str
    """The save's nonce, the same on all ranks."""

    values: tuple[ValueOrder, ...]
    structure_key: str
    """Key of the structure that lists the written parts of tensors."""

    structure: str | None = None
    """Text of that structure; None if this process's last save had the same one."""

    @property
    def folder(self) -> str:
        return checkpoint_folder(self.step, self.claim, self.nonce)

    def order(self, structure: Structure, *, rank: int, world_size: int) -> SaveOrder:
        """Build the save's order from this request and its structure."""
        return SaveOrder(
            rank=rank,
            world_size=world_size,
            step=self.step,
            claim=self.claim,
            nonce=self.nonce,
            structure=structure,
            values=self.values,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """The answer to a STAGE request: this rank's whole share is on its local disk, or none of it."""

    held: bool
    """True if the region is no longer needed. Otherwise the share has to be written from it."""

    why_not: str | None = None
    """The reason as text; None if the share is held, or if an earlier answer had the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadRequest:
    """Upload the share that was staged for `folder` to the root."""

    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The answer to a WRITE or UPLOAD request: this rank's share is durable."""

    size_bytes: int
    manifest: ManifestRef


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRequest:
    """Commit a save that all ranks have written. The answer comes once the commit is in the log."""

    folder: str
    others: tuple[ManifestRef, ...]
    """Manifests of the ranks from 1 on, by rank."""

    duration_millis: int
    metrics: dict[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A commit in the log, and the URI of its folder."""

    record: CommitRecord
    uri: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VoidRequest:
    """Give up the save in `folder`."""

    folder: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseRequest:
    """Finish the remaining work, and end."""

    within_millis: int = 0
    """Time for all remaining work: half of it for the work after commits, the rest for the last report."""
