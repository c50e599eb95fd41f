"""What the trainer and its companion say to each other. A request has an answer; the state is told without one."""

from dataclasses import dataclass
from enum import StrEnum

from stepkeeper.checkpoint import SaveOrder
from stepkeeper.companion.endpoint import ReportTarget
from stepkeeper.contract import Identity
from stepkeeper.log import Claim, CommitRecord, ForeignBase, ManifestRef
from stepkeeper.log.restarts import Past
from stepkeeper.policy.keep import Keep
from stepkeeper.tier import TierPlace

__all__ = [
    "Begin",
    "Begun",
    "Close",
    "Commit",
    "Committed",
    "Kind",
    "Open",
    "Plan",
    "Quarantine",
    "Restored",
    "Staged",
    "Upload",
    "Void",
    "Write",
    "Written",
]


class Kind(StrEnum):
    """A message's name on the wire. The dataclass of the same name is its body; the answer's is in parentheses."""

    OPEN = "open"
    BEGIN = "begin"  # (Begun)
    WRITE = "write"  # with the region's file descriptor (Written)
    STAGE = "stage"  # a Write, with the region's file descriptor (Staged)
    UPLOAD = "upload"  # (Written)
    COMMIT = "commit"  # (Committed)
    VOID = "void"
    QUARANTINE = "quarantine"  # (Begun)
    RESTORED = "restored"
    REFRESH = "refresh"  # without a body (Begun)
    CLOSE = "close"
    STATE = "state"  # a TrainerState


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """The first thing that a companion is told."""

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
class Begin:
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
class Quarantine:
    commit: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """All ranks have read this commit whole."""

    commit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the saves of a state have in common for as long as it is built alike."""

    tensors: str
    """One order a line, each the JSON of a list."""

    aliases: dict[str, str]
    """Further names of tied tensors."""

    key_paths: str
    """Name → keys that lead to it in the nested state, as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """This rank's share of a save; its bytes are in the region that comes along."""

    order: SaveOrder
    plan: str | None = None
    """The name of the plan that has its tensors; None: the order has them, and there is no more to say of them."""

    told: Plan | None = None
    """That plan, unless this process has been told it by the last save before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """All that one rank writes is on its local disk, or nothing is."""

    held: bool
    """The region is needed no more. Else it is to be written from there."""

    why_not: str | None = None
    """For people; None where they were told before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """What was staged for `folder` goes to the root."""

    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """All that one rank writes is durable."""

    size_bytes: int
    manifest: ManifestRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """All ranks have written; the answer comes when the commit is in the log."""

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
class Void:
    """The save in `folder` is given up."""

    folder: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    within_millis: int = 0
    """How long all that is left to do may take: half of it what comes after commits, what remains the last report."""
