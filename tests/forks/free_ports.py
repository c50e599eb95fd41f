"""Choose a port for a server that another process is to start."""

import random
import socket
from typing import Final

__all__ = ["free_port"]

_PORTS: Final = range(12_000, 30_000)
"""Below those that Linux gives to whoever asks for any: until the server has it, such a one may go to anybody."""


def free_port() -> int:
    """Return a port that nothing listens on, by chance, so that others who choose at the same time choose another."""
    chance = random.SystemRandom()
    while True:
        port = chance.choice(_PORTS)
        with socket.socket() as tried:
            try:
                tried.bind(("", port))
            except OSError:
                continue
        return port
