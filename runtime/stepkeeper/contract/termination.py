"""Define the termination message, a report of a process's end that the kubelet copies into the pod's status."""

from dataclasses import dataclass, replace
from typing import Annotated, Final, Self

from stepkeeper.contract.exits import Cause, ExitCode, NoticeSource
from stepkeeper.contract.report import CommitPoint
from stepkeeper.contract.wire import AtMost, decode_message, encode_json

__all__ = ["Termination"]

_LIMIT_BYTES: Final = 4096
"""The size at which the kubelet cuts a message."""

_ERROR_LIMIT_BYTES: Final = 2048

# The strength of an exit code as evidence of the pod's end.
_PRECEDENCE: Final[dict[int, int]] = {
    ExitCode.DONE: 0,
    ExitCode.PEER_LOST: 1,
    ExitCode.SAVED: 3,
    ExitCode.FENCED: 4,
}
_PRECEDENCE_OF_ERRORS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Termination:
    """The termination message of a process.

    Readers prefer it to the exit code: torchrun and shells replace exit codes, but the file survives them.
    """

    code: int
    """The intended exit code (`ExitCode`, or the application's own)."""

    kind: str | None = None
    """An `EndKind`."""

    step: int | None = None
    """The last finished step."""

    root: Annotated[str, AtMost(64)] | None = None
    """The nonce of the log's first entry."""

    committed: CommitPoint | None = None
    """The newest commit of this process."""

    restored: CommitPoint | None = None
    """The commit that this process restored last. It is no proof of progress."""

    claim: int | None = None
    cause: str | None = None
    """A `Cause`, if the process knows it."""

    notice: str | None = None
    """The `NoticeSource` that asked it to stop."""

    decision: Annotated[str, AtMost(512)] | None = None
    """The decision what to save in the remaining time, and its reason, as text."""

    agreed_step: int | None = None
    """The step at which all ranks agreed to stop. No rank had failed by then."""

    error: str | None = None
    """The end of the traceback."""

    first_failure: Annotated[str, AtMost(256)] | None = None
    """The rank in this pod that failed first, and its error. A replacing message keeps it."""

    rank: int | None = None
    """The rank of the process. A pod may have several ranks, and has one message."""

    restart: int | None = None
    """The number of restarts by a launcher in the pod before this process (torchrun's max_restarts)."""

    @property
    def error_line(self) -> str:
        """The error's type and the first line of its message; the error's last line if only that is known, or empty."""
        if not self.error or not self.error.strip():
            return ""
        whose, _, line = (self.first_failure or "").partition(": ")
        return line if line and whose == f"rank {self.rank}" else self.error.strip().splitlines()[-1]

    def replaces(self, earlier: "Termination") -> bool:
        """Return whether this message replaces an earlier one in the pod.

        A later message of the same process replaces its earlier one, and so does one from a later restart. Among
        processes that run side by side, the message with the strongest evidence of the pod's end stands. The operator
        uses the same order among pods. A stop for a notice counts more than an error: a process that was asked to stop
        often fails with another error soon after.

        A launcher stops the other processes once one of them has ended. Their messages replace nothing.
        """
        if self.rank == earlier.rank or self.restart != earlier.restart:
            return True
        return _precedence(self.code) >= _precedence(earlier.code) and not self._follows(earlier)

    def join(self, earlier: "Termination") -> "Termination":
        """Return this message or the earlier one, whichever stands, with the first failure of both."""
        stands = self if self.replaces(earlier) else earlier
        # A failure before a restart, or before the training was done after all, explains no end.
        if self.restart != earlier.restart or stands.code == ExitCode.DONE:
            return stands
        return replace(stands, first_failure=earlier.first_failure or self.first_failure)

    def _follows(self, earlier: "Termination") -> bool:
        """Return whether a launcher stopped this process, with SIGTERM, because the earlier one had ended."""
        if self.code != ExitCode.SAVED:
            return False
        if earlier.code == ExitCode.SAVED:
            # It stopped for a notice of its own, such as a directive. A SIGTERM from the kubelet reaches both.
            return self.notice == NoticeSource.SIGTERM and earlier.notice not in {NoticeSource.SIGTERM, None}
        return earlier.code != ExitCode.DONE and earlier.notice is None

    @classmethod
    def from_json(cls, data: bytes | str) -> Self:
        """Decode a message, with unknown causes as Disruptions. Raises ContractError for another's."""
        message = decode_message(cls, data)
        if message.cause is None or message.cause in {cause.value for cause in Cause}:
            return message
        return replace(message, cause=Cause.DISRUPTION.value)

    def to_json(self) -> bytes:
        """Encode the message in at most 4096 bytes. The error is cut from its front until it fits."""
        # Half a surrogate pair, as in a file name that isn't UTF-8, would make the message unreadable.
        first = self.first_failure and self.first_failure.encode(errors="replace").decode()
        error = self.error
        if error is not None:
            error = error.encode(errors="replace")[-_ERROR_LIMIT_BYTES:].decode(errors="ignore")
        message = replace(self, error=error, first_failure=first)
        data = encode_json(message)
        while len(data) > _LIMIT_BYTES and error:
            error = error[len(error) // 2 + 1 :]
            data = encode_json(replace(message, error=error))
        return data


def _precedence(code: int) -> int:
    """Return how strong the evidence of an exit code is, compared with others of the pod."""
    return _PRECEDENCE.get(code, _PRECEDENCE_OF_ERRORS)
