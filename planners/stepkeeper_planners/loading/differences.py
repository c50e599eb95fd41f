"""Collect the differences between a state and a checkpoint from all ranks, and report them as one error."""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Final

import numpy as np

from stepkeeper_planners.errors import LoadMismatchError, format_ranks
from stepkeeper_planners.loading.name_suggestions import find_rename, suggest_names

_log: Final = logging.getLogger(__name__)

_SHOWN: Final = 100
"""The most names that a message of the log lists."""

_NEAR: Final = 8
"""The number of missing names for which similar names are searched; a message shows no more."""

_SENT: Final = 1000
"""Most names of each kind that a rank sends to the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """Everything that keeps a state from being loaded, as one rank sees it."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: Mapping[str, str] = field(default_factory=dict)
    castable: tuple[str, ...] = ()
    """The mismatched names that `cast` would convert."""
    asked: tuple[str, ...] = ()
    """The top-level names that the state requests."""
    changing: tuple[str, ...] = ()
    """Top-level names, such as a data loader's: below each, both sides have values under names that the other lacks,
    and no tensors."""
    optimizers: tuple[str, ...] = ()
    """The optimizers in the state or in the checkpoint."""
    primed: tuple[str, ...] = ()
    """The optimizers that have state in the state: they took a step, or were primed."""
    left_over: Mapping[str, str] = field(default_factory=dict)
    """Differences of optimizers' groups that only a strict load refuses."""
    strict: bool = True
    """Whether what only one side has is refused. Else it is logged."""

    def __bool__(self) -> bool:
        return self.stops_rank or bool(self.strict and self.unexpected)

    @property
    def stops_rank(self) -> bool:
        """True if this rank's state can't be loaded, whatever other ranks ask for."""
        return bool(self.mismatched or (self.strict and (self.missing or self.left_over)))

    @property
    def is_none(self) -> bool:
        """True if state and checkpoint have the same."""
        return not (self.missing or self.unexpected or self.mismatched or self.left_over)

    def short(self) -> "Differences":
        """Return a copy with a bounded number of names of each kind, to send to ranks that mostly have the same."""
        return replace(
            self,
            missing=self.missing[:_SENT],
            unexpected=self.unexpected[:_SENT],
            mismatched=dict(list(self.mismatched.items())[:_SENT]),
            left_over=dict(list(self.left_over.items())[:_SENT]),
            castable=self.castable[:_SENT],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The differences that a rank sends to the coordinator."""

    differences: Differences
    unexpected_bits: bytes
    """One bit for each of the checkpoint's names in order, set if this rank doesn't ask for it. Short, but complete."""

    @classmethod
    def from_differences(
        cls, differences: Differences, stored_names: Iterable[str], *, short: bool
    ) -> "Findings":
        """Pack a rank's differences for sending.

        Args:
            differences: the rank's differences.
            stored_names: the checkpoint's names, the same on all ranks.
            short: whether to send a bounded number of names only.
        """
        unexpected = frozenset(differences.unexpected)
        bits = np.array([name in unexpected for name in sorted(stored_names)], dtype=bool)
        sent = replace(differences.short() if short else differences, unexpected=())
        return cls(differences=sent, unexpected_bits=np.packbits(bits).tobytes())


def intersect_unexpected(
    findings: Sequence[Findings | None], stored_names: Iterable[str]
) -> list[Differences | None]:
    """Return the ranks' differences, with only those unexpected names that no rank requests.

    Each pipeline stage requests its own names, so a name that one rank doesn't expect may belong to another.
    """
    names = sorted(stored_names)
    common = np.ones(len(names), dtype=bool)
    for each in findings:
        data = np.frombuffer(b"" if each is None else each.unexpected_bits, dtype=np.uint8)
        common &= np.unpackbits(data, count=len(names)).astype(bool) if each else False
    unexpected = tuple(name for name, is_common in zip(names, common, strict=True) if is_common)
    return [None if each is None else replace(each.differences, unexpected=unexpected) for each in findings]


def judge_differences(by_rank: Sequence[Differences | None]) -> LoadMismatchError | None:
    """Return one error of all ranks' differences, as `build_mismatch_error`. If none is refused, log them."""
    if any(by_rank):
        return build_mismatch_error(by_rank)
    found = {rank: each for rank, each in enumerate(by_rank) if each is not None}
    reasons = {name: f" ({reason})" for each in found.values() for name, reason in each.left_over.items()}
    for what, kind in (
        ("not in the checkpoint, left as they were", "missing"),
        ("not in the state, not restored", "unexpected"),
        ("differences of groups", "left_over"),
    ):
        names = sorted(_union(found, len(by_rank), attrgetter(kind)).items())
        listed = []
        for name, ranks in names[:_SHOWN]:
            on = f" (on {format_ranks(ranks)})" if ranks else ""
            listed.append(f"{name}{reasons.get(name, '')}{on}")
        if names:
            shown = ", ".join(listed) + (", …" if len(names) > _SHOWN else "")
            _log.warning("strict=False: %d %s: %s", len(names), what, shown)
    return None


def build_mismatch_error(
    by_rank: Sequence[Differences | None], *, loaded: str = "nothing was loaded"
) -> LoadMismatchError:
    """Build one error from all ranks' differences. It names the ranks where they don't agree.

    Args:
        by_rank: each rank's differences; None for a rank that found none.
        loaded: the part of the state that was changed.
    """
    found = {rank: each for rank, each in enumerate(by_rank) if each}
    # Without strict, these aren't refused.
    logged_only: dict[str, Any] = {"missing": (), "unexpected": (), "left_over": {}}
    found = {rank: each if each.strict else replace(each, **logged_only) for rank, each in found.items()}
    missing = _union(found, len(by_rank), lambda each: each.missing)
    unexpected = _union(found, len(by_rank), lambda each: each.unexpected)
    mismatched = _union(found, len(by_rank), lambda each: (*each.mismatched, *each.left_over))
    reasons = {n: why for each in found.values() for n, why in {**each.mismatched, **each.left_over}.items()}
    together = Differences(
        missing=tuple(sorted(missing)),
        unexpected=tuple(sorted(unexpected)),
        mismatched={name: reasons[name] for name in sorted(reasons)},
        castable=tuple(sorted({name for each in found.values() for name in each.castable})),
        asked=tuple(sorted({name for each in found.values() for name in each.asked})),
        changing=tuple(sorted({name for each in found.values() for name in each.changing})),
        primed=tuple(sorted({name for each in found.values() for name in each.primed})),
        optimizers=tuple(sorted({name for each in found.values() for name in each.optimizers})),
    )
    some = {**missing, **unexpected, **mismatched}
    return LoadMismatchError(
        missing=together.missing,
        unexpected=together.unexpected,
        mismatched=together.mismatched,
        ranks={name: those for name, those in some.items() if those is not None},
        advice=(*_causes(together), *_arguments(together)),
        loaded=loaded,
    )


def _union(
    found: Mapping[int, Differences], world_size: int, names: Callable[[Differences], Sequence[str]]
) -> dict[str, tuple[int, ...] | None]:
    """Return each name with the ranks that report it; None for all ranks."""
    ranks: dict[str, list[int]] = {}
    # A rank whose list `short` has cut may have the name too.
    cut = {rank for rank, each in found.items() if len(names(each)) >= _SENT}
    for rank, each in found.items():
        for name in names(each):
            ranks.setdefault(name, []).append(rank)
    every = set(range(world_size))
    return {name: None if every - set(those) <= cut else tuple(those) for name, those in ranks.items()}


def _causes(differences: Differences) -> Iterator[str]:
    missing, unexpected = differences.missing, differences.unexpected
    rename = find_rename(missing, unexpected)
    of_missing, of_unexpected = (list_with_state(n, differences.optimizers) for n in (missing, unexpected))
    # Optimizers whose parameters are numbered in the state, and named in the checkpoint.
    numbered = {of for of, parameter in of_missing if parameter.isdecimal()}
    numbered &= {of for of, parameter in of_unexpected if not parameter.isdecimal()}
    if numbered:
        yield (
            f"The state has the parameters of {', '.join(map(repr, sorted(numbered)))} by number, the checkpoint has "
            "them by name: put the Optimizer object itself into the state. dcp.load calls state_dict() of objects at "
            'the top of a state, so put it one level down: {"state": {"model": model, "optimizer": optimizer}}.'
        )
    elif rename is not None:
        mine, theirs = rename.example
        yield (
            f"One rename fixes {rename.fixes} of {len(missing)} missing names: {rename.rule}. "
            f"{mine!r} in the state is {theirs!r} in the checkpoint."
        )
    else:
        near = suggest_names(missing, unexpected, _NEAR)
        if near:
            yield (
                "Near names: "
                + ", ".join(f"{mine!r} may be {theirs!r}" for mine, theirs in near.items())
                + "."
            )
    if not of_missing:
        yield from _advise_priming(differences)
    for name in differences.changing if rename is None else ():
        yield (
            f"If the names below {name!r} change from one start to the next, as a data loader's may, save it as "
            "Whole, or as PerRank where the ranks have their own: that is one value, with any content."
        )


def list_with_state(names: Iterable[str], optimizers: Collection[str]) -> set[tuple[str, str]]:
    """List the optimizers, and those of their parameters that these names are state of."""
    if not optimizers:
        return set()
    below = {f"{optimizer}.state." if optimizer else "state.": optimizer for optimizer in optimizers}
    return {
        (optimizer, name.removeprefix(prefix).rpartition(".")[0])
        for name in names
        for prefix, optimizer in below.items()
        if name.startswith(prefix)
    }


def _advise_priming(differences: Differences) -> Iterator[str]:
    stored = {name for name, _ in list_with_state(differences.unexpected, differences.optimizers)}
    if stored.difference(differences.primed):
        yield (
            "Call prime_optimizer(optimizer) before the load: an optimizer has no state before its first step, and a "
            "load fills only what is there."
        )
    if stored.intersection(differences.primed):
        yield "A parameter frozen before prime_optimizer() has no state: prime first, then freeze it."


def _arguments(differences: Differences) -> Iterator[str]:
    missing, unexpected = differences.missing, differences.unexpected
    foreign = sorted({name.partition(".")[0] for name in unexpected} - set(differences.asked))
    if foreign and find_rename(missing, unexpected) is None:
        yield f"exclude={_tuple(foreign)} loads the rest."
    if missing or unexpected:
        yield "strict=False loads only what both have and leaves the rest of the state as it is."
    if differences.castable:
        yield f"cast=True converts the dtype of {len(differences.castable)} of those that differ."
    others = [name for name in differences.mismatched if name not in differences.castable]
    if others:
        yield f"exclude={_tuple(others)} leaves those that differ as they are in the state."


def _tuple(names: Sequence[str]) -> str:
    shown = tuple(names[:_NEAR])
    return f"({', '.join(map(repr, shown))}, …)" if len(names) > _NEAR else repr(shown)
