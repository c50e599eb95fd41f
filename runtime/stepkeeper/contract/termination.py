"""Define the termination message: a process's last word, in a file that the kubelet copies into the pod's status."""

from dataclasses import dataclass, replace
from typing import Annotated, Final, Self

from stepkeeper.contract.exits import Cause
from stepkeeper.contract.report import CommitPoint
from stepkeeper.contract.wire import AtMost, decode_message, encode_json

__all__ = ["Termination"]

_LIMIT_BYTES: Final = 4096
"""The size at which the kubelet cuts a message."""

_ERROR_LIMIT_BYTES: Final = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Termination:
    """The last word of a process.

    It is believed before the exit code: torchrun and shells replace exit codes, but the file survives them.
    """

    code: int
    """The exit code that the process meant (`ExitCode`, or the application's own)."""

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
    """The source of the notice that asked it to stop: sigterm, directive, file, call."""

    decision: Annotated[str, AtMost(512)] | None = None
    """What it chose to save in the time that was left, and why, for people."""

    error: str | None = None
    """The end of the traceback."""

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
        error = self.error
        if error is not None:
            error = error.encode(errors="replace")[-_ERROR_LIMIT_BYTES:].decode(errors="ignore")
        data = encode_json(replace(self, error=error))
        while len(data) > _LIMIT_BYTES and error:
            error = error[len(error) // 2 + 1 :]
            data = encode_json(replace(self, error=error))
        return data
