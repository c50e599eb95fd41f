"""Handle SIGTERM in place of the handler that was there before, and put that one back."""

import signal
from collections.abc import Callable
from types import FrameType
from typing import Final

__all__ = ["SigtermHandler"]

_Handler = Callable[[int, FrameType | None], object] | int | None


class SigtermHandler:
    """Handle SIGTERM while somebody wants it as a notice, and pass it on to the handler that was there before."""

    def __init__(self, on_sigterm: Callable[[], bool], on_exit: Callable[[SystemExit], None]) -> None:
        """Install it, in the main thread.

        Args:
            on_sigterm: Called first, inside the signal handler; True if somebody takes the signal as a notice.
            on_exit: Called, inside the signal handler, with the SystemExit that the previous handler raised.

        """
        self._on_sigterm = on_sigterm
        self._on_exit = on_exit
        self.is_permanent = False
        """Never uninstall: a process that was told to stop must not die of a second SIGTERM while it ends."""

        self.before: Final[_Handler] = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._on_sigterm() or self.is_permanent:
            if callable(self.before):
                try:
                    self.before(number, frame)
                except SystemExit as error:
                    # Training ends at a step that all ranks save, not here. The thread logs this; a handler must not.
                    self._on_exit(error)
        elif callable(self.before):
            self.before(number, frame)
        elif self.before != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def uninstall(self) -> None:
        """Put the handler back that was there before, unless somebody has installed another one since."""
        # A handler that was installed after this one stays. If it calls this one, this one passes the signal on.
        before = self.before or signal.SIG_DFL
        if signal.getsignal(signal.SIGTERM) is self:
            signal.signal(signal.SIGTERM, before)
