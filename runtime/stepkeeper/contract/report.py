"""Reports: what one companion per job tells the operator, and what it is told in answer."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Final, Self, TypeAlias

from stepkeeper.contract.wire import AtMost, ContractError, decode_json, encode_json

__all__ = ["Directive", "Head", "Report", "ReportPhase", "ReportedCommit", "ReportedRestore", "SlowestRank"]

REPORT_LIMIT_BYTES: Final = 64 * 1024
MAX_COMMITS: Final = 32
MAX_METRICS: Final = 16

Uri: TypeAlias = Annotated[str, AtMost(2048)]
Nonce: TypeAlias = Annotated[str, AtMost(64)]
UnixTime: TypeAlias = Annotated[int, AtMost(253_402_300_799)]
"""Until the end of year 9999: no calendar here goes on."""


class ReportPhase(StrEnum):
    STARTING = "Starting"
    RESTORING = "Restoring"
    TRAINING = "Training"
    SAVING = "Saving"
    """A save for a notice; the trainer waits for it."""

    DONE = "Done"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedCommit:
    sequence: int
    step: int
    uri: Uri
    """Folder of the checkpoint."""

    size_bytes: int
    duration_millis: int
    """From the snapshot to the commit."""

    time_unix_s: UnixTime


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What Latest means, as the log says."""

    sequence: int
    step: int
    uri: Uri
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedRestore:
    sequence: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowestRank:
    slowest: int
    step: int
    """The slowest rank's step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One report. Its authority is its token's pod, never a name in here."""

    phase: ReportPhase
    root: Nonce | None = None
    """Nonce of the log's first entry; None before begin."""

    claim: int | None = None
    tail: int = 0
    """Highest slot known. Status takes `head` when `root` is new or `tail` is greater."""

    head: Head | None = None
    step: int | None = None
    """Last finished step."""

    step_millis: int | None = None
    commits: tuple[ReportedCommit, ...] = ()
    """Commits of this claim that no report was answered for yet, oldest first."""

    in_flight_step: int | None = None
    restored: ReportedRestore | None = None
    """What this attempt resumed from; None: from scratch (once phase is Training)."""

    ranks: SlowestRank | None = None
    notice: str | None = None
    error: str | None = None
    metrics: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.commits) > MAX_COMMITS:
            raise ContractError(f"at most {MAX_COMMITS} commits in a report")
        if len(self.metrics) > MAX_METRICS:
            raise ContractError(f"at most {MAX_METRICS} metrics in a report")

    @classmethod
    def from_json(cls, data: bytes | str) -> Self:
        if len(data) > REPORT_LIMIT_BYTES:
            raise ContractError(f"a report has at most {REPORT_LIMIT_BYTES} bytes")
        return decode_json(cls, data)

    def to_json(self) -> bytes:
        return encode_json(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Directive:
    """The answer to a report."""

    checkpoint_now: str | None = None
    """Id of a request; answered once by a save."""

    stop: bool = False
    """A notice: save and exit 75."""

    dump_stacks: bool = False
    report_interval_s: int = 10

    @classmethod
    def from_json(cls, data: bytes | str) -> Self:
        return decode_json(cls, data)

    def to_json(self) -> bytes:
        return encode_json(self)
