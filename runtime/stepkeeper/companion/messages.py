"""Define the messages between a trainer and its companion. A request has an answer; the state is told without one."""

from dataclasses import dataclass
from enum import StrEnum

from stepkeeper.checkpoint import SaveOrder, Structure, ValueOrder
from stepkeeper.checkpoint.manifest import checkpoint_folder
from stepkeeper.companion.endpoint import ReportTarget
from stepkeeper.contract import Identity
from stepkeeper.log import Claim, CommitRecord, ForeignBase, ManifestRef
from stepkeeper.log.restarts import Past
from stepkeeper.policy.keep import Keep
from stepkeeper.tier import TierPlace

__all__ = [
    "Begun",
    "ClaimRequest",
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
    """A message's name on the wire. Its body is the request or notice of that name; the answer's is in parentheses."""

    OPEN = "open"
    CLAIM = "claim"  # (Begun)
    WRITE = "write"  # with the region's file descriptor (Written)
    STAGE = "stage"  # a WriteRequest, with the region's file descriptor (Staged)
    UPLOAD = "upload"  # (Written)
    COMMIT = "commit"  # (Committed)
    VOID = "void"
    QUARANTINE = "quarantine"  # (Begun)
    VERIFIED = "verified"
    REFRESH = "refresh"  # without a body (Begun)
    CLOSE = "close"
    STATE = "state"  # a TrainerState


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRequest:
    """Open a root for one rank: the first thing that a companion is asked."""

    rank: int
    world_size: int
    uri: str
    identity: Identity | None = None
    keep: Keep | None = None
    """None: nothing is ever deleted."""

    tier: TierPlace | None = None
    """Where saves come by on their way to the root."""

    unsafe_single_writer: bool = False

    report_target: ReportTarget | None = None
    report_interval_s: int = 10
    claim: Claim | None = None
    """The trainer's claim, if it has one: a companion that follows a lost one goes on under it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRequest:
    """Claim the root, to go on from a base."""

    base: int | None = None
    """The commit that this process has restored; None: whatever HEAD is."""

    legacy: ForeignBase | None = None
    """Another writer's step that this process has restored, or is about to."""

    offer: ForeignBase | None = None
    """Another writer's step to go on from where nothing is committed."""

    after: Claim | None = None
    """The trainer's claim, which must hold until then: it is followed by another, unless HEAD is that base already."""

    nonce: str | None = None
    """Of the entry: so a companion that follows a lost one can tell whether it was put."""

    take_over: str | None = None
    """Name of the job whose root this is to become ours."""

    take_over_any: bool = False
    """Whatever that job's name is."""

    asks_past: bool = False
    """The answer is to say what is known of this training's past."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """The claim, and what it goes on from."""

    claim: Claim
    root: str
    tail: int
    base: CommitRecord | None = None
    legacy: ForeignBase | None = None
    """What it goes on from where that is no commit."""

    past: Past | None = None
    """If that was asked for, and the log could be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineRequest:
    """Condemn a commit that was read bad."""

    commit: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedNotice:
    """Note that all ranks have read this commit whole."""

    commit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRequest:
    """Write this rank's share of a save; its bytes are in the region that comes along."""

    step: int
    claim: int
    """The claim's slot."""

    nonce: str
    """The save's own, the same on all ranks."""

    values: tuple[ValueOrder, ...]
    structure_key: str
    """Of the structure that says what is written of tensors."""

    structure: str | None = None
    """The text of that structure; None: the last save that this process has written had it too."""

    @property
    def folder(self) -> str:
        return checkpoint_folder(self.step, self.claim, self.nonce)

    def order(self, structure: Structure, *, rank: int, world_size: int) -> SaveOrder:
        """Order all of it, with the structure that has this key."""
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
    """All that one rank writes is on its local disk, or nothing is."""

    held: bool
    """The region is needed no more. Else it is to be written from there."""

    why_not: str | None = None
    """For people; None where they were told before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadRequest:
    """Bring what was staged for `folder` to the root."""

    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """All that one rank writes is durable."""

    size_bytes: int
    manifest: ManifestRef


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRequest:
    """Commit a save that all ranks have written; the answer comes when it is in the log."""

    folder: str
    others: tuple[ManifestRef, ...]
    """Manifests of the ranks from 1 on."""

    duration_millis: int
    metrics: dict[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    record: CommitRecord
    uri: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VoidRequest:
    """Give up the save in `folder`."""

    folder: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseRequest:
    """End, once what is left to do is done."""

    within_millis: int = 0
    """How long all that is left to do may take: half of it what comes after commits, what remains the last report."""
