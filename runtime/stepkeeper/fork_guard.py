"""Keep the manager's open descriptors out of processes that the training forks.

A forked data-loader worker inherits every open descriptor, and keeps its copies for as long as it lives. So descriptors
are created while no thread can fork, and each owner closes its copies in a forked child.

This covers only forks by Python. A worker that C code forks inherits everything, so no code may wait for the other end
of a socket or pipe to be closed: see `companion.processes`.
"""

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

__all__ = ["ForkAware", "MemoryFile", "forget_in_forks", "forks_held_back"]

_PATIENCE_S: Final = 5.0
"""Seconds that a fork and the creation of descriptors wait for each other. Then they continue unguarded: a worker that
inherits descriptors only costs memory, which is better than a stuck training."""


class ForkAware(Protocol):
    """An object with descriptors that a forked child must close, or threads that it doesn't have."""

    def forget_after_fork(self) -> None:
        """Close this copy of the descriptors, and become inactive. Called in a forked child."""
        ...


class _Guard:
    """Make forks and the creation of descriptors exclude each other. There is one guard per process."""

    def __init__(self) -> None:
        # Reentrant: a signal handler may fork, or drop a manager, while its thread holds the lock.
        self._lock = threading.RLock()
        self._forking = threading.local()
        self._objects: weakref.WeakSet[ForkAware] = weakref.WeakSet()

    @contextmanager
    def held(self) -> Iterator[None]:
        lock = self._lock
        is_held = lock.acquire(timeout=_PATIENCE_S)
        try:
            yield
        finally:
            if is_held:
                lock.release()

    def add(self, aware: ForkAware) -> None:
        self._objects.add(aware)

    def before_fork(self) -> None:
        self._forking.is_held = self._lock.acquire(timeout=_PATIENCE_S)

    def after_fork_in_parent(self) -> None:
        # `is_held` is missing if this thread had begun to fork before this module was imported.
        if getattr(self._forking, "is_held", False):
            self._lock.release()

    def after_fork_in_child(self) -> None:
        # The thread that held the old lock may not exist here.
        self._lock = threading.RLock()
        objects, self._objects = list(self._objects), weakref.WeakSet()
        for each in objects:
            each.forget_after_fork()


_guard: Final = _Guard()


@contextmanager
def forks_held_back() -> Iterator[None]:
    """Hold back forks by other threads during the system calls that create a descriptor and store it.

    The block must not take a lock, log, or import: the thread that waits to fork may hold any lock.
    """
    with _guard.held():
        yield


def forget_in_forks(owner: ForkAware) -> None:
    """Call `owner.forget_after_fork()` in every child that is forked from now on, as long as the owner exists."""
    _guard.add(owner)


class MemoryFile:
    """An anonymous file that shares memory with another process by its descriptor."""

    def __init__(self, name: str, size_bytes: int = 0) -> None:
        """Create the file, with `size_bytes` zeros."""
        with forks_held_back():
            self.fd = os.memfd_create(name)
            forget_in_forks(self)
        os.ftruncate(self.fd, size_bytes)

    def close(self) -> None:
        """Close this process's descriptor."""
        fd, self.fd = self.fd, -1
        os.close(fd)

    def forget_after_fork(self) -> None:
        """Close this copy in a forked child, which would keep the memory for as long as it lives."""
        if self.fd >= 0:
            self.close()


os.register_at_fork(
    before=_guard.before_fork,
    after_in_parent=_guard.after_fork_in_parent,
    after_in_child=_guard.after_fork_in_child,
)
