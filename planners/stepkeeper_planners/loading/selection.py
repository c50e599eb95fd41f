"""Select the names that a load is about, and how strictly state and checkpoint must agree on them."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import translate
from functools import cached_property, lru_cache

from stepkeeper_planners.errors import PatternError


@dataclass(frozen=True, kw_only=True)
class LoadRules:
    """Rules for which names are loaded, and which differences raise.

    Patterns are fnmatch's, on flat names, and select everything below a name too: "model" selects "model.w", and
    "model.layers.*.bias" only the biases.
    """

    strict: bool = True
    """Raise for missing and unexpected names. If False, load the names that both have; the rest stays as it is."""
    items: Collection[str] | None = None
    """Look only at these, on both sides; None for all."""
    exclude: Collection[str] = ()
    """Don't look at these."""
    cast: bool = False
    """Convert elements of another dtype, as far as `torch.can_cast` allows."""

    def __post_init__(self) -> None:
        for argument, patterns in (("items", self.items), ("exclude", self.exclude)):
            if isinstance(patterns, str):
                raise PatternError(
                    f"{argument} is a collection of patterns; write {argument}=({patterns!r},)"
                )

    @property
    def is_whole(self) -> bool:
        """True if state and checkpoint must agree on all names."""
        return self.strict and self.selects_all

    @property
    def selects_all(self) -> bool:
        """True if no name is left out."""
        return self.items is None and not self.exclude

    def selects(self, fqn: str) -> bool:
        """Return whether the load is about this name."""
        if self._items is not None and not self._items.match(fqn):
            return False
        return self._exclude is None or not self._exclude.match(fqn)

    def find_unmatched_items(self, names: Collection[str]) -> list[str]:
        """Return the patterns in `items` that match none of these names. They are mostly misspelt."""
        return [
            pattern
            for pattern in self.items or ()
            if not any(_compiled((pattern,)).match(name) for name in names)
        ]

    @cached_property
    def _items(self) -> re.Pattern[str] | None:
        return None if self.items is None else _compiled(tuple(self.items))

    @cached_property
    def _exclude(self) -> re.Pattern[str] | None:
        return _compiled(tuple(self.exclude)) if self.exclude else None


@lru_cache(maxsize=64)
def _compiled(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """Compile patterns that match a selected name, and every name below one."""
    # A pattern also matches itself literally: a name may contain fnmatch's special characters.
    forms = [
        form
        for pattern in patterns
        for form in (translate(pattern), translate(f"{pattern}.*"), rf"(?s:{re.escape(pattern)}(\..*)?)\Z")
    ]
    return re.compile("|".join(forms) or "(?!)")
