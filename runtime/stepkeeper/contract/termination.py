"""Define the termination message: a process's last word, in a file that the kubelet copies into the pod's status."""

from dataclasses import dataclass, replace
from typing import Annotated, Final, Self

from stepkeeper.contract.exits import Cause, ExitCode, NoticeSource
from stepkeeper.contract.report import CommitPoint
from stepkeeper.contract.wire import AtMost, decode_message, encode_json

__all__ = ["Termination"]

_LIMIT_BYTES: Final = 4096
"""The size at which the kubelet cuts a message."""

_ERROR_LIMIT_BYTES: Final = 2048

_TELLING: Final[dict[int, int]] = {
    ExitCode.DONE: 0,
    ExitCode.PEER_LOST: 1,
    ExitCode.SAVED: 3,
    ExitCode.FENCED: 4,
}
_TELLING_OF_ERRORS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Termination:
    """The last word of a process.

    It is believed before the exit code: torchrun and shells replace exit codes, but the file survives them.
    """

    code: int
    """The exit code that the process meant (`ExitCode`, or the application's own)."""

    kind: str | None = None
    """An `EndKind`."""

    step: int | None = None
    """The last step that was finished."""

    root: Annotated[str, AtMost(64)] | None = None
    """The nonce of the log's first entry."""

    committed: CommitPoint | None = None
    """The newest commit that was made in this process."""

    restored: CommitPoint | None = None
    """The commit that this process restored last. It proves no progress."""

    claim: int | None = None
    cause: str | None = None
    """A `Cause`, if the process knows it."""

    notice: str | None = None
    """The `NoticeSource` that asked it to stop."""

    decision: Annotated[str, AtMost(512)] | None = None
    """What it chose to save in the time that was left, and why, for people."""

    agreed_step: int | None = None
    """The step at which it stopped because all ranks had agreed to: none of them had failed by then."""

    error: str | None = None
    """The end of the traceback."""

    first_failure: Annotated[str, AtMost(256)] | None = None
    """The rank in this pod that failed first, and its error. Messages that replace this one keep it."""

    rank: int | None = None
    """The rank of the process: a pod may have several, and one message."""

    restart: int | None = None
    """How often a launcher in the pod had started its processes anew before this one (torchrun's max_restarts)."""

    def replaces(self, earlier: "Termination") -> bool:
        """Tell whether this message takes the place of an earlier one in the pod.

        What a process says later counts, and so do the processes that a launcher has started later. Of several that
        run side by side the one that tells most about the pod's end counts, as for the operator among pods: those
        that are told to stop, or lose a peer, often fail with something else soon after.

        A launcher tells the others to stop once one of them has ended. What those say then is no news of the pod.
        """
        beside = self.rank != earlier.rank and self.restart == earlier.restart
        return not beside or (_telling(self.code) >= _telling(earlier.code) and not self._follows(earlier))

    def join(self, earlier: "Termination") -> "Termination":
        """Return the one that stands of this message and an earlier one in the pod, with the first failure of both."""
        stands = self if self.replaces(earlier) else earlier
        if self.restart != earlier.restart or stands.code == ExitCode.DONE:
            return stands
        return replace(stands, first_failure=earlier.first_failure or self.first_failure)

    def _follows(self, earlier: "Termination") -> bool:
        """Tell whether this process, beside the earlier one, was told to stop because that one had ended."""
        if self.code != ExitCode.SAVED:
            return False
        if earlier.code == ExitCode.SAVED:
            return self.notice == NoticeSource.SIGTERM and earlier.notice not in {NoticeSource.SIGTERM, None}
        return earlier.code != ExitCode.DONE and earlier.notice is None

    @classmethod
    def from_json(cls, data: bytes | str) -> Self:
        """Decode a message. An unknown cause is read as a Disruption.

        Raises:
            ContractError: The message is somebody else's.

        """
        said = decode_message(cls, data)
        if said.cause is None or said.cause in {cause.value for cause in Cause}:
            return said
        return replace(said, cause=Cause.DISRUPTION.value)

    def to_json(self) -> bytes:
        """Encode the message in at most 4096 bytes. The error is cut from its front until it fits."""
        # Half a surrogate pair, as of a file name that is no UTF-8, would make the message unreadable.
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


def _telling(code: int) -> int:
    """Return how much an exit code tells about the end of a pod."""
    return _TELLING.get(code, _TELLING_OF_ERRORS)
