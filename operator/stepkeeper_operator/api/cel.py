"""Write validation rules in CEL, for all resource types."""

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["CelRule", "cel_list", "listed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CelRule:
    """A rule that the API server checks, and the message for an object that breaks it."""

    at: str
    """Path of the field that is `self`, from the root of the object; empty for the object itself."""

    cel: str
    message: str


def cel_list(values: Iterable[str] | Iterable[int]) -> str:
    """Render the values as a list in CEL."""
    return "[" + ", ".join(f"'{v}'" if isinstance(v, str) else str(v) for v in values) + "]"


def listed(values: Iterable[str] | Iterable[int]) -> str:
    """Render the values for a message: a, b and c."""
    *most, last = map(str, values)
    return f"{', '.join(most)} and {last}"
