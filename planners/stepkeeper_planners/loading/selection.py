"""Select the names that a load is about, and how strictly state and checkpoint must agree on them."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Final

from stepkeeper_planners.errors import PatternError

_GLOB: Final = re.compile(r"[*?\[]")


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
    renamed: Mapping[str, str] = field(default_factory=dict)
    """For parts of the state that the checkpoint names otherwise: its name → the name in the state."""

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
        fqn = self.name_in_state(fqn)
        if self._items is not None and not self._items(fqn):
            return False
        return self._exclude is None or not self._exclude(fqn)

    def name_in_state(self, fqn: str) -> str:
        """Return the state's name of the entry that has this name in a checkpoint."""
        for above in _list_beginnings(fqn) if self.renamed else ():
            if above in self.renamed:
                return self.renamed[above] + fqn[len(above) :]
        return fqn

    def find_unmatched_items(self, names: Collection[str]) -> list[str]:
        """Return the patterns in `items` that match none of these names. They are mostly misspelt."""
        known = list(map(self.name_in_state, names))
        return [
            pattern for pattern in self.items or () if not any(_compiled((pattern,))(name) for name in known)
        ]

    @cached_property
    def _items(self) -> Callable[[str], bool] | None:
        return None if self.items is None else _compiled(tuple(self.items))

    @cached_property
    def _exclude(self) -> Callable[[str], bool] | None:
        return _compiled(tuple(self.exclude)) if self.exclude else None


def _list_beginnings(fqn: str) -> Iterator[str]:
    """Yield "a", "a.b" and "a.b.c" for "a.b.c"."""
    return accumulate(fqn.split("."), "{}.{}".format)


@lru_cache(maxsize=64)
def _compiled(patterns: tuple[str, ...]) -> Callable[[str], bool]:
    """Return a function that is True for a name if one of the patterns selects it, or one above it."""
    # A pattern also matches itself literally: a name may contain fnmatch's special characters.
    names = frozenset(patterns)
    globs = [pattern for pattern in patterns if _GLOB.search(pattern)]
    forms = [form for glob in globs for form in (translate(glob), translate(f"{glob}.*"))]
    # (?!) matches nothing.
    matches = re.compile("|".join(forms) or "(?!)").match

    def selects(fqn: str) -> bool:
        return not names.isdisjoint(_list_beginnings(fqn)) or matches(fqn) is not None

    return selects
