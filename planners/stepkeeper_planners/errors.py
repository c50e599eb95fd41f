"""What the planners raise. Every error also is the builtin that a caller without this package would expect."""

from collections.abc import Mapping, Sequence


class PlannerError(Exception):
    """Base of everything that this package raises on purpose."""


class LayoutError(PlannerError, ValueError):
    """A tensor's chunks overlap, leave a gap or lie outside it."""


class UnsupportedShardingError(PlannerError, ValueError):
    """A tensor is placed in a way that says nothing about which device holds which part of it."""


class UnsupportedValueError(PlannerError, TypeError):
    """A value is of a type that is not stored, because reading it back would mean to run code."""


class ValueDecodeError(PlannerError, ValueError):
    """The stored bytes of a value are damaged, or hold a type that is not on the list."""


class DuplicateNameError(PlannerError, ValueError):
    """Two entries of a state get one name when nested keys are joined with dots."""


class PerRankError(PlannerError, ValueError):
    """Values of one rank each were saved by another number of ranks, and nothing says what to make of them."""


class LoadMismatchError(PlannerError, ValueError):
    """The state that asks and the checkpoint that answers differ; every difference is listed."""

    def __init__(
        self,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        mismatched: Mapping[str, str] | None = None,
    ) -> None:
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.mismatched = dict(mismatched or {})
        super().__init__("\n".join(self._lines()))

    def _lines(self) -> list[str]:
        lines = ["The state doesn't fit the checkpoint; nothing was loaded."]
        if self.missing:
            lines.append(
                f"In the state but not in the checkpoint ({len(self.missing)}): {', '.join(self.missing)}"
            )
        if self.unexpected:
            names = ", ".join(self.unexpected)
            lines.append(f"In the checkpoint but not in the state ({len(self.unexpected)}): {names}")
        lines.extend(f"{fqn}: {reason}" for fqn, reason in self.mismatched.items())
        return lines
