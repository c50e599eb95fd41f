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
    """Names of messages on the wire.

    A message's body is the request or notice of that name; the comment gives the answer in parentheses.
    """

    OPEN = "open"  # with the file descriptors that its StackRequest tells of
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
    LINK = "link"  # the address at which rank 0's companion takes calls of the others


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
    """The local disk that saves pass on their way to the root; None: they go there directly."""

    unsafe_single_writer: bool = False

    report_target: ReportTarget | None = None
    report_interval_s: int = 10
    claim: Claim | None = None
    """The trainer's claim, if it has one: a companion that follows a lost one goes on under it."""

    stacks: StackRequest | None = None
    """How the stacks of the trainer's threads are read; None: they aren't."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRequest:
    """Claim the root, and go on from a base."""

    base: int | None = None
    """Slot of the commit that this process has restored; None: go on from HEAD."""

    legacy: ForeignBase | None = None
    """Another writer's step that this process has restored, or is about to restore."""

    branch: bool = False
    """True to go on from nothing: the next commit begins a branch."""

    offer: ForeignBase | None = None
    """Another writer's step to go on from if nothing is committed."""

    after: Claim | None = None
    """The trainer's present claim, which must still hold.

    Another claim follows it, unless HEAD is the base already.
    """

    nonce: str | None = None
    """Nonce of the claim's entry. By it, a companion that follows a lost one can tell whether the entry was put."""

    take_over: str | None = None
    """Name of the job whose root becomes this one's."""

    take_over_any: bool = False
    """True to take over the root of any job."""

    asks_past: bool = False
    """True to have this training's past in the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedRoot:
    """A claim, and the base that it goes on from."""

    claim: Claim
    root: str
    """Id of the root, from its first entry."""

    tail: int
    """The log's last slot."""

    base: CommitRecord | None = None
    """The commit that the claim goes on from, if it is one."""

    legacy: ForeignBase | None = None
    """The other writer's step that the claim goes on from, if it is one."""

    branching: bool = False
    """True if the next commit begins a branch, and leaves the base behind."""

    past: RestartHistory | None = None
    """This training's past, if the request asked for it and the log could be read."""


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
    """Write this rank's share of a save. Its bytes are in the region that comes along."""

    step: int
    claim: int
    """Slot of the claim."""

    nonce: str
    """The save's nonce, the same on all ranks."""

    values: tuple[ValueOrder, ...]
    structure_key: str
    """Key of the structure that lists what is written of tensors."""

    structure: str | None = None
    """Text of that structure; None if the last save that this process has written had it too."""

    @property
    def folder(self) -> str:
        return checkpoint_folder(self.step, self.claim, self.nonce)

    def order(self, structure: Structure, *, rank: int, world_size: int) -> SaveOrder:
        """Build the whole order from this request and the structure that has its key."""
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
    """The answer to a STAGE request: this rank's whole share is on its local disk, or nothing of it is."""

    held: bool
    """True if the region isn't needed any more. Else the share has to be written from the region."""

    why_not: str | None = None
    """The reason in words; None if the share is held, or if an earlier answer gave the reason."""


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
