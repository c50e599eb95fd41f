"""Report a conversion's progress and result."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stepkeeper_planners.errors import printable

__all__ = ["Conversion", "Progress", "ProgressMeter", "join_names"]

Progress = Callable[[int, int], None]
"""Called with the bytes of tensors that are done, and with those of all tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """The result of a conversion."""

    files: tuple[Path, ...]
    """The files that were written."""
    tensors: tuple[str, ...]
    """The tensors that were converted, by their names in the source."""
    left_out: tuple[str, ...] = ()
    """The other names that the source holds."""
    tensor_bytes: int
    """The bytes of all tensors; a tied tensor counts once."""


@dataclass(slots=True, kw_only=True)
class ProgressMeter:
    """Count the bytes that are done, and pass them to the caller's callback."""

    total_bytes: int
    callback: Progress | None
    done_bytes: int = field(default=0, init=False)

    def add(self, n_bytes: int) -> None:
        """Count `n_bytes` more as done."""
        self.done_bytes += n_bytes
        if self.callback is not None:
            self.callback(self.done_bytes, self.total_bytes)


def join_names(names: Sequence[str], most: int = 8) -> str:
    """Return the names for a message: the first `most` of them, and how many more there are."""
    rest = len(names) - most
    return ", ".join(map(printable, names[:most])) + (f" and {rest} more" if rest > 0 else "")
