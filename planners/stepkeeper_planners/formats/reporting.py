"""What a conversion tells: how far it is, and what it did."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

__all__ = ["BUFFER_BYTES", "Conversion", "Progress", "ProgressMeter", "join_names", "printable"]

Progress = Callable[[int, int], None]
"""Called with the bytes of tensors that are done, and those of all tensors."""

BUFFER_BYTES: Final = 16 << 20
"""How much is read and written at a time."""

_MOST_SHOWN: Final = 300
"""Characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What was written."""

    files: tuple[Path, ...]
    tensors: tuple[str, ...]
    """By their names in the source."""
    left_out: tuple[str, ...] = ()
    """What the source holds beyond that, by its names there."""
    tensor_bytes: int
    """Of all tensors; a tied one counts once."""


@dataclass(slots=True, kw_only=True)
class ProgressMeter:
    """Counts what is done, and tells who asked to be told."""

    total_bytes: int
    callback: Progress | None
    done_bytes: int = field(default=0, init=False)

    def add(self, n_bytes: int) -> None:
        """So many more are done."""
        self.done_bytes += n_bytes
        if self.callback is not None:
            self.callback(self.done_bytes, self.total_bytes)


def join_names(names: Sequence[str], most: int = 8) -> str:
    """The names for a message, the first of many."""
    rest = len(names) - most
    return ", ".join(map(printable, names[:most])) + (f" and {rest} more" if rest > 0 else "")


def printable(name: str) -> str:
    """The name for a message, whatever characters a file has in it, and however many."""
    if len(name) > _MOST_SHOWN:
        name = f"{name[:_MOST_SHOWN]}…"
    return name if name.isprintable() else ascii(name)
