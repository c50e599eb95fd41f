"""Check numbers from the training, and format numbers and sizes."""

import operator
from typing import Final, SupportsFloat, SupportsIndex

__all__ = ["check_number", "check_whole", "count_text", "size_text"]

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def check_whole(name: str, number: object, least: int | None = None) -> int:
    """Return the argument `name`, an integer of any library, as int. Raises TypeError and ValueError."""
    if isinstance(number, bool) or not isinstance(number, SupportsIndex):
        raise TypeError(f"{name} must be a whole number, not a value of type {type(number).__name__}")
    whole = operator.index(number)
    if least is not None and whole < least:
        raise ValueError(f"{name} must be at least {least}, not {whole}")
    return whole


def check_number(name: str, number: object) -> float:
    """Return the argument `name`, a number of any library, as Python's float. Raises TypeError if it isn't one."""
    if isinstance(number, bool) or not isinstance(number, SupportsFloat):
        raise TypeError(f"{name} must be a number, not a value of type {type(number).__name__}")
    return float(number)


def count_text(number: int, name: str, several: str | None = None) -> str:
    """Format a number of things: "1 rank", "2 ranks". `several` is the plural, if it isn't the name and an s."""
    return f"{number} {name if number == 1 else several or f'{name}s'}"


def size_text(size_bytes: int) -> str:
    """Format a number of bytes with a binary unit."""
    size = float(size_bytes)
    for unit in _UNITS[:-1]:
        if size < 1024:
            return f"{size_bytes} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} {_UNITS[-1]}"
