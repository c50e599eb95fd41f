"""Let the other ranks see that this one runs, however long its part of a save takes."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from stepkeeper.errors import PeerLostError

__all__ = ["Stillness", "give_signs"]

EVERY_S: Final = 1.0


class Stillness:
    """Measure how long a rank that has promised signs of life has given none, for one wait for it."""

    def __init__(self, limit_s: float) -> None:
        """Have seen no sign.

        Args:
            limit_s: Seconds without a sign after which the rank stands still.

        """
        self._limit_s = limit_s
        self._n_signs = 0
        self._since_s = 0.0

    def is_over_limit(self, n_signs: int, now_s: float) -> bool:
        """Take over how many signs the rank has given by `now_s`; 0 if it promises none. Tell if it stands still."""
        if n_signs != self._n_signs:
            self._n_signs, self._since_s = n_signs, now_s
        return n_signs > 0 and now_s > self._since_s + self._limit_s


@contextmanager
def give_signs(give: Callable[[], None], end: Callable[[], None]) -> Iterator[None]:
    """Give signs of life in a thread of its own while the block runs. A process that is stopped gives none.

    Args:
        give: Gives one sign, and so promises more. A PeerLostError ends the thread: the store is gone.
        end: Takes the promise back. It is called in the same thread, and so after the last sign.

    """
    over = threading.Event()

    def run() -> None:
        with suppress(PeerLostError):
            give()
            while not over.wait(EVERY_S):
                give()
        with suppress(PeerLostError):
            end()

    # From Python 3.12 on no thread starts while the interpreter ends. Then nothing is promised.
    with suppress(RuntimeError):
        threading.Thread(target=run, name="signs-of-life", daemon=True).start()
    try:
        yield
    finally:
        over.set()
