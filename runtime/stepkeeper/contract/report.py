"""Define the reports that one companion per job sends to the operator, and the answers to them."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Final, Self, TypeAlias

from stepkeeper.contract.wire import AtMost, ContractError, Else, decode_message, encode_json

__all__ = ["CommitPoint", "Directive", "Head", "Report", "ReportPhase", "ReportedCommit", "SlowestRank"]

REPORT_LIMIT_BYTES: Final = 64 * 1024
MAX_COMMITS: Final = 32
MAX_METRICS: Final = 16

Uri: TypeAlias = Annotated[str, AtMost(2048)]
Nonce: TypeAlias = Annotated[str, AtMost(64)]
UnixTime: TypeAlias = Annotated[int, AtMost(253_402_300_799)]
"""Seconds since 1970, up to the end of year 9999, the last that datetime supports."""


class ReportPhase(StrEnum):
    """The phase of the training."""

    STARTING = "Starting"
    RESTORING = "Restoring"
    TRAINING = "Training"
    SAVING = "Saving"
    """A save for a notice is under way, and the trainer waits for it."""

    DONE = "Done"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedCommit:
    """A commit as a report lists it."""

    sequence: int
    """Its slot in the log."""

    step: int
    uri: Uri
    """The folder of the checkpoint."""

    size_bytes: int
    duration_millis: int
    """The time from the snapshot to the commit."""

    time_unix_s: UnixTime


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The commit that the log has as the latest."""

    sequence: int
    step: int
    uri: Uri
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitPoint:
    """A commit, by its place in the log and in the training."""

    sequence: int
    """Its slot in the log."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowestRank:
    """The slowest rank and its step."""

    slowest: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One report. The pod of its token identifies the sender, never a name in the report."""

    phase: Annotated[ReportPhase, Else(ReportPhase.TRAINING)]
    root: Nonce | None = None
    """The nonce of the log's first entry; None before the root is claimed."""

    claim: int | None = None
    """The slot of this training's claim; None before the root is claimed."""

    tail: int = 0
    """The highest known slot. The status takes `head` over if `root` is new or `tail` is greater."""

    head: Head | None = None
    step: int | None = None
    """The last finished step."""

    step_millis: int | None = None
    commits: tuple[ReportedCommit, ...] = ()
    """Commits of this claim that no answered report has listed, oldest first."""

    in_flight_step: int | None = None
    restored: CommitPoint | None = None
    """The commit that this attempt resumed from. None: from scratch (once the phase is Training)."""

    ranks: SlowestRank | None = None
    notice: str | None = None
    error: str | None = None
    metrics: dict[str, str] = field(default_factory=dict)
    stacks: Annotated[str, AtMost(16 * 1024)] | None = None
    """The newest stacks of the ranks' threads, shortened. They are reported once."""

    def __post_init__(self) -> None:
        if len(self.commits) > MAX_COMMITS:
            raise ContractError(f"at most {MAX_COMMITS} commits in a report")
        if len(self.metrics) > MAX_METRICS:
            raise ContractError(f"at most {MAX_METRICS} metrics in a report")

    @classmethod
    def from_json(cls, data: bytes | str) -> Self:
        """Decode a report of at most 64 KiB. Raises ContractError, which names the fault."""
        if len(data) > REPORT_LIMIT_BYTES:
            raise ContractError(f"a report has at most {REPORT_LIMIT_BYTES} bytes")
        return decode_message(cls, data)

    def to_json(self) -> bytes:
        """Encode the report."""
        return encode_json(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Directive:
    """The answer to a report."""

    checkpoint_now: str | None = None
    """The id of a request to save. One save answers it."""

    save_reason: Annotated[str, AtMost(512)] | None = None
    """The reason of the request, for the training's log."""

    save_within_s: int | None = None
    """Seconds from this answer to the event that the save precedes. 0: the event may begin at any moment."""

    stop: bool = False
    """True for a notice: save and exit 75."""

    dump_stacks: bool = False
    """True to write the stacks of all threads of all ranks to the log and into the next report."""

    report_interval_s: int = 10

    @classmethod
    def from_json(cls, data: bytes | str) -> Self:
        """Decode an answer. Raises ContractError."""
        return decode_message(cls, data)

    def to_json(self) -> bytes:
        """Encode the answer."""
        return encode_json(self)
