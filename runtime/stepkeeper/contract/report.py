"""Define reports, by which one companion per job tells the operator how training goes, and the answers to them."""

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
"""Seconds, until the end of year 9999: no calendar here goes on."""


class ReportPhase(StrEnum):
    """The phase of a training."""

    STARTING = "Starting"
    RESTORING = "Restoring"
    TRAINING = "Training"
    SAVING = "Saving"
    """A save for a notice is under way, and the trainer waits for it."""

    DONE = "Done"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedCommit:
    """A commit, in a report."""

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
    """The commit that Latest means, by the log."""

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
    """The slowest rank, and how far it has come."""

    slowest: int
    """Its rank."""

    step: int
    """Its step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One report. Its authority is its token's pod, never a name in it."""

    phase: Annotated[ReportPhase, Else(ReportPhase.TRAINING)]
    root: Nonce | None = None
    """The nonce of the log's first entry; None before the begin."""

    claim: int | None = None
    """The slot of this training's claim; None before the begin."""

    tail: int = 0
    """The highest slot that is known. The status takes `head` if `root` is new or `tail` is greater."""

    head: Head | None = None
    step: int | None = None
    """The last finished step."""

    step_millis: int | None = None
    commits: tuple[ReportedCommit, ...] = ()
    """Commits of this claim that are in no answered report yet, oldest first."""

    in_flight_step: int | None = None
    restored: CommitPoint | None = None
    """The commit that this attempt resumed from. None: from scratch (once the phase is Training)."""

    ranks: SlowestRank | None = None
    notice: str | None = None
    error: str | None = None
    metrics: dict[str, str] = field(default_factory=dict)
    stacks: Annotated[str, AtMost(16 * 1024)] | None = None
    """The newest stacks of the ranks' threads, shortened; once."""

    def __post_init__(self) -> None:
        if len(self.commits) > MAX_COMMITS:
            raise ContractError(f"at most {MAX_COMMITS} commits in a report")
        if len(self.metrics) > MAX_METRICS:
            raise ContractError(f"at most {MAX_METRICS} metrics in a report")

    @classmethod
    def from_json(cls, data: bytes | str) -> Self:
        """Decode a report.

        Args:
            data: At most 64 KiB of JSON.

        Raises:
            ContractError: The data is longer, no report, or of a newer format; the message names what is wrong.

        """
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
    """The id of a request to save; one save answers it."""

    save_reason: Annotated[str, AtMost(512)] | None = None
    """Why that is asked for; the training's log has it."""

    save_within_s: int | None = None
    """Seconds from this answer to what the save is ahead of. 0: it may begin at any moment."""

    stop: bool = False
    """A notice: save and exit 75."""

    dump_stacks: bool = False
    """Write the stacks of all threads of all ranks to the log, and into the next report."""

    report_interval_s: int = 10

    @classmethod
    def from_json(cls, data: bytes | str) -> Self:
        """Decode an answer. Raises ContractError."""
        return decode_message(cls, data)

    def to_json(self) -> bytes:
        """Encode the answer."""
        return encode_json(self)
