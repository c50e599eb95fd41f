"""Connect the companions of all ranks, so that they can dump all stacks. This is the trainers' part.

Rank 0's trainer opens the port of its companion, and the trainers share its address once all have met.
"""

import secrets
import socket
import threading
from typing import Any, Final

from stepkeeper.fork_guard import forget_in_forks, forks_held_back
from stepkeeper.links.handshake import listen
from stepkeeper.links.joining import addresses_of_host
from stepkeeper.loggers import logger

__all__ = ["StackMeeting"]

_log: Final = logger(__name__)


class StackMeeting:
    """The port of rank 0's companion. The trainer holds it, so that a later companion has the same."""

    def __init__(self, rank: int, world_size: int) -> None:
        """Store the arguments; no port is opened yet."""
        self._is_host = rank == 0 and world_size > 1
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self.secret: Final = secrets.token_hex(32) if self._is_host else None
        """The secret that proves both ends to be ranks of the training; None in a calling rank or a single one."""

        forget_in_forks(self)

    def listening_fds(self) -> tuple[int, ...]:
        """Return the descriptor of the listening socket for the companion; empty if it calls, or can't listen."""
        listener = self._listening()
        return () if listener is None else (listener.fileno(),)

    def describe(self, towards: str | None) -> dict[str, Any] | None:
        """Describe this rank's address for other ranks' companions; None if it doesn't listen.

        `towards` is a host that all ranks reach: the route to it shows which of this host's addresses they can reach.
        """
        listener = self._listening()
        if listener is None:
            return None
        return {"hosts": addresses_of_host(towards), "port": listener.getsockname()[1], "secret": self.secret}

    def forget_after_fork(self) -> None:
        """Close this copy of the socket in a forked child."""
        self._lock = threading.Lock()
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()

    def close(self) -> None:
        """Close the socket for good."""
        with self._lock:
            self._is_host = False
            listener, self._listener = self._listener, None
            if listener is not None:
                listener.close()

    def _listening(self) -> socket.socket | None:
        with self._lock:
            if self._listener is None and self._is_host:
                try:
                    with forks_held_back():
                        self._listener = listen()
                except OSError as error:
                    self._is_host = False
                    text = "stack requests reach this rank only, since listening for other ranks failed: %r"
                    _log.warning(text, error)
            return self._listener
