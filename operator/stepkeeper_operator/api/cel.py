"""Write validation rules in CEL, for all resource types."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

__all__ = ["CUBIC_TOPOLOGY", "CelRule", "cel_list", "listed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CelRule:
    """A rule that the API server checks, and the words with which it refuses an object."""

    at: str
    """Path of the field that is `self`, from the root of the object; empty for the object itself."""

    cel: str
    message: str


CUBIC_TOPOLOGY: Final = (
    "(self.topology.matches('^[1-9][0-9]{0,3}x[1-9][0-9]{0,3}x[1-9][0-9]{0,3}$')"
    " && self.topology.split('x').all(side, int(side) % 4 == 0)"
    " && self.topology.split('x').map(side, int(side)).isSorted())"
)
"""CEL: `self.topology` is made of whole cubes of 4x4x4, with its sides in ascending order."""


def cel_list(values: Iterable[str] | Iterable[int]) -> str:
    """Return the values as a list in CEL."""
    return "[" + ", ".join(f"'{v}'" if isinstance(v, str) else str(v) for v in values) + "]"


def listed(values: Iterable[str] | Iterable[int]) -> str:
    """Return the values as a message lists them: a, b and c."""
    *most, last = map(str, values)
    return f"{', '.join(most)} and {last}"
