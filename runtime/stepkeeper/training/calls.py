"""Mark the manager's calls that a training waits in: a notice ends their waits, and no fence is forgotten."""

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from stepkeeper.coordination.waits import Waits
from stepkeeper.training.shutdown import Shutdown

__all__ = ["training_call"]

P = ParamSpec("P")
R = TypeVar("R")


class _Parts(Protocol):
    @property
    def waits(self) -> Waits: ...

    @property
    def shutdown(self) -> Shutdown: ...


class _HasParts(Protocol):
    @property
    def _parts(self) -> _Parts: ...


M = TypeVar("M", bound=_HasParts)


def training_call(call: Callable[Concatenate[M, P], R]) -> Callable[Concatenate[M, P], R]:
    """Note, while `call` runs, that the training is in it, and remember a fence that it raises.

    What `call` waits for ends with a notice's time. Should it be stuck all the same, in a driver or a file system, the
    process is ended shortly before the grace period is over.
    """

    @wraps(call)
    def noted(manager: M, /, *args: P.args, **kwargs: P.kwargs) -> R:
        parts = manager._parts  # noqa: SLF001  # it decorates the manager's own methods
        with parts.waits.in_call(), parts.shutdown.record_fencing():
            return call(manager, *args, **kwargs)

    return noted
