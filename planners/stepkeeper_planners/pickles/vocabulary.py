"""List the names that a pickle may hold, and what each of them makes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["GlobalName", "Name", "UnknownGlobal", "Vocabulary"]

Name = tuple[str, str]


@dataclass(frozen=True, slots=True)
class GlobalName:
    """Stands for a function or class of the vocabulary while the pickle is read; nothing can be done with it."""

    name: Name


@dataclass(frozen=True, slots=True, eq=False)
class UnknownGlobal:
    """Stands for what the vocabulary has no place for, and for all that the pickle makes of it."""

    name: Name


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """All that a pickle may name."""

    constants: Mapping[Name, object] = field(default_factory=dict)
    calls: Mapping[Name, Callable[..., object]] = field(default_factory=dict)
    """Makers, which check their arguments; a name as an argument comes as `GlobalName`."""
    classes: Mapping[Name, type] = field(default_factory=dict)
    """Of which empty instances may be made."""
    builds: Mapping[type, Callable[[Any, Any], object]] = field(default_factory=dict)
    """Instance and state → what stands in its place from then on. Each instance is built exactly once."""
    attributes: frozenset[type] = frozenset()
    """Of which instances may get attributes, which are passed over."""
    key_types: frozenset[type] = frozenset()
    """Of keys of dicts, beside plain scalars and tuples of those."""
    persistent: Callable[[object], object] | None = None
    keeps_unknown: bool = False
    """Other names are not refused; `UnknownGlobal` stands for them. Only to find out where they are."""
