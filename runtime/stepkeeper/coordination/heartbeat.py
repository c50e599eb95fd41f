"""Let the ranks that wait for this one see that it runs, and what it moves, however long a save or restore takes."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from stepkeeper.errors import PeerLostError

__all__ = ["beating"]

EVERY_S: Final = 1.0


@contextmanager
def beating(beat: Callable[[int], None], end: Callable[[], None]) -> Iterator[Callable[[int], None]]:
    """Beat in a thread of its own while the block runs. A process that is stopped doesn't.

    Args:
        beat: Publishes one beat and how many bytes were moved since the one before, and so promises more beats. A
            PeerLostError ends the thread: the store is gone.
        end: Takes the promise back. It is called in the same thread, and so after the last beat.

    Yields:
        What notes that more bytes were moved. Used by one thread.

    """
    over = threading.Event()
    moved_bytes = 0

    def note_moved(n_bytes: int) -> None:
        nonlocal moved_bytes
        moved_bytes += n_bytes

    def run() -> None:
        told_bytes = 0
        with suppress(PeerLostError):
            while True:
                now_bytes = moved_bytes
                beat(now_bytes - told_bytes)
                told_bytes = now_bytes
                if over.wait(EVERY_S):
                    break
        with suppress(PeerLostError):
            end()

    # From Python 3.12 on no thread starts while the interpreter ends. Then nothing is promised.
    with suppress(RuntimeError):
        threading.Thread(target=run, name="heartbeat", daemon=True).start()
    try:
        yield note_moved
    finally:
        over.set()
