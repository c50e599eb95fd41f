"""Choose a port for a server that another process is to start."""

import random
import socket
from pathlib import Path
from typing import Final

_GIVEN: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LEAST: Final = 12_000


def free_port() -> int:
    """Return a port that nothing listens on, by chance, so that others who choose at the same time choose another."""
    chance = random.SystemRandom()
    # Linux gives those from `first` on to whoever asks for any: until the server has it, such a one may go to anybody.
    first = int(_GIVEN.read_text().split()[0])
    ports = range(min(_LEAST, first // 2), first)
    while True:
        port = chance.choice(ports)
        with socket.socket() as tried:
            try:
                tried.bind(("", port))
            except OSError:
                continue
        return port
