"""Which names a load is about, and how exact the state and the checkpoint have to agree on them."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import translate
from functools import cached_property, lru_cache

from stepkeeper_planners.errors import PatternError


@dataclass(frozen=True, kw_only=True)
class LoadRules:
    """What is loaded, and what is raised. Patterns are fnmatch's on flat names, and select all that is below too:

    "model" selects "model.w"; "model.layers.*.bias" the biases only.
    """

    strict: bool = True
    """Missing and unexpected names are raised. If not: what both have is loaded, the rest stays as it is."""
    items: Collection[str] | None = None
    """Only these are looked at, on both sides; None for all."""
    exclude: Collection[str] = ()
    """These are not looked at."""
    cast: bool = False
    """Elements of another dtype are converted, within what keeps their kind."""

    def __post_init__(self) -> None:
        for argument, patterns in (("items", self.items), ("exclude", self.exclude)):
            if isinstance(patterns, str):
                raise PatternError(
                    f"{argument} is a collection of patterns; write {argument}=({patterns!r},)"
                )

    def selects(self, fqn: str) -> bool:
        """Whether the load is about this name."""
        if self._items is not None and not self._items.match(fqn):
            return False
        return self._exclude is None or not self._exclude.match(fqn)

    def find_unmatched_items(self, names: Collection[str]) -> list[str]:
        """The patterns of `items` that select none of these names: mostly misspelt."""
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
    """Matches a name that is selected itself, or is below one that is."""
    # A pattern also means itself: a name may hold what fnmatch gives a meaning.
    forms = [
        form
        for pattern in patterns
        for form in (translate(pattern), translate(f"{pattern}.*"), rf"(?s:{re.escape(pattern)}(\..*)?)\Z")
    ]
    return re.compile("|".join(forms) or "(?!)")
