"""Mark the manager's calls that a training waits in, so that a process that is told to stop isn't stuck in one."""

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from stepkeeper.coordination.waits import Waits

__all__ = ["heeds_notices"]

P = ParamSpec("P")
R = TypeVar("R")


class _Parts(Protocol):
    @property
    def waits(self) -> Waits: ...


class _HasParts(Protocol):
    @property
    def _parts(self) -> _Parts: ...


M = TypeVar("M", bound=_HasParts)


def heeds_notices(call: Callable[Concatenate[M, P], R]) -> Callable[Concatenate[M, P], R]:
    """Note, while `call` runs, that the training is in it.

    What `call` waits for ends with a notice's time. Should it be stuck all the same, in a driver or a file system, the
    process is ended shortly before the grace period is over.
    """

    @wraps(call)
    def noted(manager: M, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with manager._parts.waits.in_call():  # noqa: SLF001  # it decorates the manager's own methods
            return call(manager, *args, **kwargs)

    return noted
