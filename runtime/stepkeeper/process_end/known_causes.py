"""Tell from the exception that ends a process whether the cause lies outside of the program."""

from collections.abc import Iterator
from typing import Final

from stepkeeper.contract import Cause
from stepkeeper.errors import StorageAwayError, TransientStorageError, UnknownOutcomeError

__all__ = ["UNANSWERED", "find_known_cause"]

UNANSWERED: Final = (TransientStorageError, UnknownOutcomeError, StorageAwayError)
"""The errors of a store that gave no answer, however often it was asked."""

_MOST_LINKS: Final = 20


def find_known_cause(failure: BaseException | None) -> Cause | None:
    """Return the cause that the exception, or one that it was raised from, tells for certain; None if it tells none."""
    unanswered = any(isinstance(error, UNANSWERED) for error in _list_causes(failure))
    return Cause.STORAGE_UNAVAILABLE if unanswered else None


def _list_causes(failure: BaseException | None) -> Iterator[BaseException]:
    """List the exception and those that it was explicitly raised from."""
    for _ in range(_MOST_LINKS):
        if failure is None:
            return
        yield failure
        failure = failure.__cause__
