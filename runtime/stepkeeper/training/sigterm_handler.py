"""Handle SIGTERM in place of the handler that was there before, and put that one back."""

import signal
from collections.abc import Callable
from types import FrameType
from typing import Final

__all__ = ["SigtermHandler"]

_Handler = Callable[[int, FrameType | None], object] | int | None


class SigtermHandler:
    """A handler for SIGTERM, and the one that was there before."""

    def __init__(self, on_sigterm: Callable[[], bool], on_exit: Callable[[SystemExit], None]) -> None:
        """Install it, in the main thread.

        Args:
            on_sigterm: Called first, inside the signal handler; True if somebody takes the signal as a notice.
            on_exit: Called, inside the signal handler, with the SystemExit that the previous handler raised.

        """
        self._on_sigterm = on_sigterm
        self._on_exit = on_exit
        self.is_permanent = False
        """It is never let go: a process that was told to stop is not to die of being told again while it ends."""

        self.before: Final[_Handler] = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._on_sigterm() or self.is_permanent:
            if callable(self.before):
                try:
                    self.before(number, frame)
                except SystemExit as error:
                    # The end is ours to choose: at a step that all ranks save. The thread logs it, a handler must not.
                    self._on_exit(error)
        elif callable(self.before):
            self.before(number, frame)
        elif self.before != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def uninstall(self) -> None:
        # Somebody who installed a handler after us keeps it; by way of that, this one is as if it weren't there.
        before = self.before or signal.SIG_DFL
        if signal.getsignal(signal.SIGTERM) is self:
            signal.signal(signal.SIGTERM, before)
