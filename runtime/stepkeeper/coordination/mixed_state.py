"""Remember that a restore failed halfway. The state is mixed then, and is never saved."""

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import clear_frames
from typing import Final

from stepkeeper.errors import FencedError, NoticeDeadlineError, PartlyRestoredError, text_with_notes

__all__ = ["MixedState"]

_KEPT: Final = (PartlyRestoredError, FencedError, NoticeDeadlineError)
"""Errors that are raised unchanged. The last two end the process with their own exit codes."""


class MixedState:
    """Track whether the state holds parts of a checkpoint whose restore failed, until another one succeeds.

    A restore has the same outcome in all ranks, so all have the same answer. Only `names` may differ.
    """

    def __init__(self) -> None:
        self._doing: str | None = None
        """The checkpoint, and the operation on it; None if the state isn't mixed."""

        self._end = ""
        """How that operation ended, for messages."""

        self._cause: BaseException | None = None
        self._is_changed_now = False
        """True if the restore that runs now has changed the state."""

        self.names: frozenset[str] = frozenset()
        """Names of this rank's state that may hold parts of it. The next restore has to fill all of them."""

    @property
    def is_mixed(self) -> bool:
        """True from the first change of the state to the end of a restore that succeeds."""
        return self._doing is not None

    def note_change(self, what: str, doing: str, names: frozenset[str] = frozenset()) -> None:
        """Record that a restore of `what` changes the state's parts `names` from here on. `doing` is for messages."""
        self._doing, self._end = f"{what} only, since {doing}", "has not ended"
        self._is_changed_now = True
        self.names |= names

    def clear(self) -> None:
        """Record that a restore has filled the state."""
        self._doing, self._cause, self.names = None, None, frozenset()

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Raise PartlyRestoredError in place of this restore's error, if the state was changed before it."""
        if self._cause is not None:
            # The traceback of an earlier failure holds memory that this restore may need.
            clear_frames(self._cause.__traceback__)
        self._is_changed_now = False
        try:
            yield
        except BaseException as error:
            if not (self.is_mixed and self._is_changed_now):
                # This restore has changed nothing: the state is what it was, mixed or not.
                raise
            self._cause, self._end = error, f"failed: {type(error).__name__}: {text_with_notes(error)}"
            if isinstance(error, _KEPT) or not isinstance(error, Exception):
                raise
            raise self._build_error() from error

    def check(self) -> None:
        """Check that the state isn't mixed. Raises PartlyRestoredError."""
        if self.is_mixed:
            raise self._build_error() from self._cause

    def _build_error(self) -> PartlyRestoredError:
        return PartlyRestoredError(
            f"the state holds parts of {self._doing} {self._end}. Nothing is saved until a restore of this or another "
            "step has filled all of the state. If no restore succeeds, restart the program"
        )
