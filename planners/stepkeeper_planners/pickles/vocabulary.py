"""Define what a pickle may name, and what each name makes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["GlobalName", "Name", "UnknownGlobal", "Vocabulary"]

Name = tuple[str, str]


@dataclass(frozen=True, slots=True)
class GlobalName:
    """Stands for a function or class of the vocabulary while the pickle is read; it can't do anything."""

    name: Name


@dataclass(frozen=True, slots=True, eq=False)
class UnknownGlobal:
    """Stands for a name that the vocabulary lacks, and for everything that the pickle makes of it."""

    name: Name


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Everything that a pickle may name."""

    constants: Mapping[Name, object] = field(default_factory=dict)
    calls: Mapping[Name, Callable[..., object]] = field(default_factory=dict)
    """Functions that make objects, and check their arguments. A name among the arguments comes as `GlobalName`."""
    classes: Mapping[Name, type] = field(default_factory=dict)
    """Classes of which empty instances may be made."""
    builds: Mapping[type, Callable[[Any, Any], object]] = field(default_factory=dict)
    """By class: takes an instance and its state, returns what replaces it. Each instance is built exactly once."""
    attributes: frozenset[type] = frozenset()
    """Classes whose instances may get attributes, which are ignored."""
    key_types: frozenset[type] = frozenset()
    """Types of dict keys, in addition to plain scalars and tuples of these."""
    persistent: Callable[[object], object] | None = None
    keeps_unknown: bool = False
    """Let `UnknownGlobal` stand for other names instead of refusing them. Only for finding out where they are."""
