"""Handle SIGTERM in place of an earlier handler, and of C code that takes the signal later."""

import ctypes
import signal
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Final

from stepkeeper.ending.launcher_folder import register

__all__ = ["SigtermHandler"]

_LIBC: Final = ctypes.CDLL(None)
_C_HANDLER: Final = ctypes.CFUNCTYPE(None, ctypes.c_int)
_SA_SIGINFO: Final = 4
"""The flag of a C handler that takes three arguments instead of one."""

_PR_SET_PDEATHSIG: Final = 1
_PR_GET_PDEATHSIG: Final = 2
_NO_FUNCTION: Final = (None, int(signal.SIG_DFL), int(signal.SIG_IGN))
"""Values of an action's handler that are no C function."""


class _Action(ctypes.Structure):
    """The kernel's action for a signal, as the C library of 64-bit Linux has it."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


class SigtermHandler:
    """Handle SIGTERM if it shouldn't end this process, or else pass it on to the earlier handler.

    If the kernel would send this process SIGINT at its parent's death, it sends SIGTERM from now on.
    """

    def __init__(self, on_sigterm: Callable[[], bool]) -> None:
        """Install the handler, in the main thread. `on_sigterm` returns False if the earlier handler decides."""
        self._on_sigterm = on_sigterm
        self.before: Final = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, self)
        self._own_action: Final = _read_action()
        self.was_replaced = False
        """True if C code had replaced this handler."""

        self.replacement: Callable[[int], None] | None = None
        """That C code, if it is called too."""

        self._has_called_replacement = False
        register()
        _replace_parents_end()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.replacement is not None and not self._has_called_replacement:
            # Once: faulthandler's, for example, may raise the signal again.
            self._has_called_replacement = True
            self.replacement(number)
        is_handled = self._on_sigterm()
        if callable(self.before):
            # Training ends at a step that all ranks save, even if the earlier handler would exit at once.
            with suppress(*([SystemExit] if is_handled else [])):
                self.before(number, frame)
        elif not is_handled and self.before != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def take_back(self) -> bool:
        """Restore this handler if C code has replaced it. Return True the first time. Any thread may call this.

        torch_xla's PreemptionSyncManager is such code. Python doesn't see it, and would never get the signal. A C
        handler with SA_SIGINFO isn't called from now on: libtpu's seems to write stacks and raise the signal again.
        """
        found, own = _read_action(), self._own_action
        if found.handler in (*_NO_FUNCTION, own.handler):
            return False
        is_first, self.was_replaced = not self.was_replaced, True
        self.replacement = None if found.flags & _SA_SIGINFO else _C_HANDLER(found.handler)
        _LIBC.sigaction(signal.SIGTERM, ctypes.byref(own), None)
        return is_first

    def uninstall(self) -> None:
        """Restore the earlier handler in Python.

        A handler that was installed later stays. If it calls this one, this one passes the signal on.
        """
        is_installed = signal.getsignal(signal.SIGTERM) is self
        if is_installed:
            signal.signal(signal.SIGTERM, self.before or signal.SIG_DFL)


def _replace_parents_end() -> None:
    # torch.multiprocessing.spawn requests SIGINT for that, which would end the training in the middle of a step.
    found = ctypes.c_int()
    _LIBC.prctl(_PR_GET_PDEATHSIG, ctypes.byref(found), 0, 0, 0)
    if found.value == signal.SIGINT:
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def _read_action() -> _Action:
    action = _Action()
    _LIBC.sigaction(signal.SIGTERM, None, ctypes.byref(action))
    return action
