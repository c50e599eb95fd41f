"""Define the errors of the planners. Each is also the builtin error that a caller without this package would expect."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Final

from typing_extensions import override

_LISTED: Final = 12
"""Most names that a message shows; longer lists are cut."""
_MOST_SHOWN: Final = 300
"""Most characters of a name that a message shows."""


class PlannerError(Exception):
    """Base of every error that this package raises on purpose."""


class LayoutError(PlannerError, ValueError):
    """The chunks of a tensor overlap, leave a gap or lie outside it."""


class UnsupportedShardingError(PlannerError, ValueError):
    """A tensor's placement doesn't determine which device holds which part of it."""


class UnsupportedValueError(PlannerError, TypeError):
    """A value has a type that isn't stored, because reading it back would mean running code."""


class PickleRefusedError(PlannerError, ValueError):
    """A pickle names something that plain data doesn't need, or is damaged. Nothing in it was run."""


class UnknownNameError(PickleRefusedError):
    """A pickle names something that this reader doesn't know. The file may be intact, but of an unsupported kind."""


class MetadataDecodeError(PlannerError, ValueError):
    """A checkpoint's metadata file is damaged, contradicts itself, or would run code. Nothing in it was run."""


class ValueDecodeError(PlannerError, ValueError):
    """The stored bytes of a value are damaged, or hold a type that isn't on the list."""


class DuplicateNameError(PlannerError, ValueError):
    """Two entries of a state get the same flat name when their keys are joined with dots."""


class PerRankError(PlannerError, ValueError):
    """Another number of ranks saved the `PerRank` values, and there is no function that converts them."""


class PatternError(PlannerError, TypeError):
    """The patterns of a load would probably select something other than intended."""


class CastError(PlannerError, OverflowError):
    """Elements don't fit the dtype that a load should convert them to."""


class RanksDifferError(PlannerError, ValueError):
    """The ranks differ in something that all of them should save alike. Nothing was written.

    The text shortens long lists; the attributes hold them whole.
    """

    def __init__(
        self, *, reasons: Mapping[str, str], ranks: Mapping[str, Sequence[int]], n_unseen: int = 0
    ) -> None:
        self.reasons = dict(reasons)
        """For each name that differs, in which way."""
        self.ranks = {name: tuple(those) for name, those in ranks.items()}
        """For each of these names, the ranks that differ from the majority."""
        self.n_unseen = n_unseen
        """The number of further ranks that differ, whose names were not compared."""
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
            lines.append(f"{self.n_unseen} more ranks differ in other ways")
        return lines


class LostWritesError(PlannerError, RuntimeError):
    """The storage writer reported success, but didn't write everything. The checkpoint is not committed."""


class WrongRanksError(PlannerError, ValueError):
    """A save or load was planned for other ranks than those that take part in it."""


class ReleasesDifferError(PlannerError, RuntimeError):
    """The ranks of a save run different releases, which divide a state differently. Nothing was written."""


class UnsupportedWriterError(PlannerError, ValueError):
    """The storage writer can't hold the whole state; it would silently lose some of it."""


class LoadMismatchError(PlannerError, ValueError):
    """The state and the checkpoint differ; the error lists every difference.

    The text shortens long lists; the attributes hold them whole.
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
        """Names that the state has and the checkpoint lacks."""
        self.unexpected = tuple(unexpected)
        """Names that the checkpoint has and the state lacks."""
        self.mismatched = dict(mismatched or {})
        """Names that both have, and how they differ."""
        self.ranks = {name: tuple(those) for name, those in (ranks or {}).items()}
        """For names that only some of the ranks report: which ranks."""
        self.advice = tuple(advice)
        """The probable causes, and suggested changes."""
        self.loaded = loaded
        """How much was loaded before the mismatch was found."""
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
    """An optimizer's state can't be made without a real training step."""


class SourceError(PlannerError, ValueError):
    """A file or folder to convert is damaged, of another kind, or holds unsupported data."""


class DestinationExistsError(PlannerError, FileExistsError):
    """Something already exists where a conversion should write its result."""


def format_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 0, 1" for a message; cut a long list."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(_shortened(list(map(str, ranks))))}"


def shorten(names: Iterable[str]) -> str:
    """Return the names for a message; cut a long list."""
    return ", ".join(_shortened(list(map(printable, names))))


def printable(name: str) -> str:
    """Return the name for a message, shortened, and escaped if it has unprintable characters."""
    if len(name) > _MOST_SHOWN:
        name = f"{name[:_MOST_SHOWN]}…"
    return name if name.isprintable() else ascii(name)
