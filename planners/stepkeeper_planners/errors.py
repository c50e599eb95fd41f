"""What the planners raise. Every error also is the builtin that a caller without this package would expect."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from typing_extensions import override

_LISTED: Final = 12
"""Names that stand in a message; a longer list is cut there."""


class PlannerError(Exception):
    """Base of everything that this package raises on purpose."""


class LayoutError(PlannerError, ValueError):
    """A tensor's chunks overlap, leave a gap or lie outside it."""


class UnsupportedShardingError(PlannerError, ValueError):
    """A tensor is placed in a way that says nothing about which device holds which part of it."""


class UnsupportedValueError(PlannerError, TypeError):
    """A value is of a type that is not stored, because reading it back would mean to run code."""


class PickleRefusedError(PlannerError, ValueError):
    """A pickle names something that data has no use for, or is damaged. Nothing of it was run."""


class UnknownNameError(PickleRefusedError):
    """A pickle names something that has no place in it: it may be whole, and of a kind that isn't read."""


class MetadataDecodeError(PlannerError, ValueError):
    """A checkpoint's metadata file is damaged, contradicts itself, or would run code. Nothing of it was run."""


class ValueDecodeError(PlannerError, ValueError):
    """The stored bytes of a value are damaged, or hold a type that is not on the list."""


class DuplicateNameError(PlannerError, ValueError):
    """Two entries of a state get one name when nested keys are joined with dots."""


class PerRankError(PlannerError, ValueError):
    """Values of one rank each were saved by another number of ranks, and nothing says what to make of them."""


class PatternError(PlannerError, TypeError):
    """What a load should be about is said in a way that would select something else than is meant."""


class CastError(PlannerError, OverflowError):
    """Elements don't fit the dtype that a load was asked to convert them to."""


class RanksDifferError(PlannerError, ValueError):
    """What all ranks should save alike differs between them. Nothing was written.

    The text shortens long lists, the attributes have them whole.
    """

    def __init__(
        self, *, reasons: Mapping[str, str], ranks: Mapping[str, Sequence[int]], n_unseen: int = 0
    ) -> None:
        self.reasons = dict(reasons)
        """For each name that differs, in which way."""
        self.ranks = {name: tuple(those) for name, those in ranks.items()}
        """For each of these names, the ranks that differ from most."""
        self.n_unseen = n_unseen
        """Further ranks that differ, in which nobody looked for names."""
        super().__init__("\n".join(self._lines()))

    @override
    def __reduce__(self) -> tuple[object, ...]:
        # Other ranks get it pickled.
        kept = partial(RanksDifferError, reasons=self.reasons, ranks=self.ranks, n_unseen=self.n_unseen)
        return (kept, ())

    def _lines(self) -> list[str]:
        lines = [f"the ranks' states differ ({len(self.reasons)}); nothing was written."]
        lines += _shortened(
            [
                f"{name} (on {format_ranks(self.ranks[name])}): {reason}"
                for name, reason in self.reasons.items()
            ]
        )
        if self.n_unseen:
            lines.append(f"{self.n_unseen} more ranks differ in yet other ways")
        return lines


class LostWritesError(PlannerError, RuntimeError):
    """The storage writer reported success without having written everything. The checkpoint is not committed."""


class WrongRanksError(PlannerError, ValueError):
    """A save or load is planned for other ranks than those that take part in it."""


class ReleasesDifferError(PlannerError, RuntimeError):
    """The ranks of a save run different releases, which don't divide a state alike. Nothing was written."""


class UnsupportedWriterError(PlannerError, ValueError):
    """The storage writer can't hold what is to be saved; it would lose some of it without a word."""


class LoadMismatchError(PlannerError, ValueError):
    """The state that asks and the checkpoint that answers differ; every difference is listed.

    The text shortens long lists, the attributes have them whole.
    """

    def __init__(
        self,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        mismatched: Mapping[str, str] | None = None,
        ranks: Mapping[str, Sequence[int]] | None = None,
        advice: Sequence[str] = (),
        loaded: str = "nothing was loaded",
    ) -> None:
        self.missing = tuple(missing)
        """Names that the state asks for and the checkpoint lacks."""
        self.unexpected = tuple(unexpected)
        """Names that the checkpoint holds and the state doesn't ask for."""
        self.mismatched = dict(mismatched or {})
        """Names that both have, and what differs."""
        self.ranks = {name: tuple(those) for name, those in (ranks or {}).items()}
        """For names that only some of several ranks report: which ranks."""
        self.advice = tuple(advice)
        """What may be the cause, and what to write instead."""
        self.loaded = loaded
        """How much was loaded before it was found."""
        super().__init__("\n".join(self._lines()))

    @override
    def __reduce__(self) -> tuple[object, ...]:
        # Other ranks get it pickled.
        kept = partial(
            LoadMismatchError,
            missing=self.missing,
            unexpected=self.unexpected,
            mismatched=self.mismatched,
            ranks=self.ranks,
            advice=self.advice,
            loaded=self.loaded,
        )
        return (kept, ())

    def _lines(self) -> list[str]:
        lines = [f"The state doesn't fit the checkpoint; {self.loaded}."]
        lines += self._listed("In the state but not in the checkpoint", self.missing)
        lines += self._listed("In the checkpoint but not in the state", self.unexpected)
        if self.mismatched:
            lines.append(f"In both, but different ({len(self.mismatched)}):")
            reasons = [f"{self._named(fqn)}: {reason}" for fqn, reason in self.mismatched.items()]
            lines += [f"  {line}" for line in _shortened(reasons)]
        return [*lines, *self.advice]

    def _listed(self, title: str, names: Sequence[str]) -> list[str]:
        if not names:
            return []
        return [f"{title} ({len(names)}): {', '.join(_shortened([self._named(name) for name in names]))}"]

    def _named(self, name: str) -> str:
        ranks = self.ranks.get(name)
        if ranks is None:
            return name
        return f"{name} (on {format_ranks(ranks)})"


def _shortened(entries: list[str]) -> list[str]:
    return (
        entries if len(entries) <= _LISTED else [*entries[:_LISTED], f"… and {len(entries) - _LISTED} more"]
    )


class PrimeError(PlannerError, TypeError):
    """An optimizer's state can't be made without a real step of the training."""


class SourceError(PlannerError, ValueError):
    """A file or folder that should be converted is damaged, of another kind, or holds what can't be converted."""


class DestinationExistsError(PlannerError, FileExistsError):
    """There is something already where the result of a conversion should go."""


def format_ranks(ranks: Sequence[int]) -> str:
    """`rank 3` or `ranks 0, 1`, for a message; a long list is cut."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(_shortened(list(map(str, ranks))))}"
