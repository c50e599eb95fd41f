"""Handle SIGTERM in place of an earlier handler, and restore that one."""

import ctypes
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from traceback import walk_tb
from types import FrameType
from typing import Any, Final

from stepkeeper.ending.launcher_folder import register, unregister

__all__ = ["SigtermHandler", "is_raised_by_handler"]

_Handler = Callable[[int, FrameType | None], object] | int | None
_LIBC: Final = ctypes.CDLL(None)
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
    """Handle SIGTERM while a listener wants it as a notice, or else pass it on to the earlier handler.

    If the kernel would send this process SIGINT at its parent's death, it sends SIGTERM while this is installed.
    """

    def __init__(self, on_sigterm: Callable[[], bool]) -> None:
        """Install the handler, in the main thread. `on_sigterm` returns True if that is a notice."""
        self._on_sigterm = on_sigterm
        self.is_permanent = False
        """True to never uninstall: a second SIGTERM must not kill a process that is stopping."""

        self.before: Final[_Handler] = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, self)
        register()
        self._owner: Final = os.getpid()
        self._own_action: Final = _read_action()
        self._displaced: _Action | None = None
        """The handler that C code had installed over this one, before this one was restored."""

        self._has_called_displaced = False
        # torch.multiprocessing.spawn requests SIGINT for that, which would end the training in the middle of a step.
        self._has_parents_end: Final = _replace_parents_end(signal.SIGINT, signal.SIGTERM)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._call_displaced(number)
        is_notice = self._on_sigterm()
        if is_notice or self.is_permanent:
            if callable(self.before):
                # Training ends at a step that all ranks save, even if the earlier handler would exit at once.
                with suppress(SystemExit):
                    self.before(number, frame)
        elif callable(self.before):
            self.before(number, frame)
        elif self.before != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def take_back(self) -> bool:
        """Restore this handler if C code has replaced it, and return True then. Any thread may call this.

        torch_xla's PreemptionSyncManager is such code. Python doesn't see it, and would never get the signal.
        From now on that code is called too if it can be.
        """
        found, own = _read_action(), self._own_action
        if found.handler in (*_NO_FUNCTION, own.handler):
            return False
        self._displaced = found
        return bool(_LIBC.sigaction(signal.SIGTERM, ctypes.byref(own), None) == 0)

    @property
    def calls_displaced(self) -> bool:
        """True if SIGTERM is passed on to the C code that had replaced this handler.

        A handler with SA_SIGINFO isn't called: libtpu's seems to write stacks and raise the signal again.
        """
        return self._displaced is not None and not self._displaced.flags & _SA_SIGINFO

    def _call_displaced(self, number: int) -> None:
        """Call the C code that wanted the signal, once: faulthandler's, for example, may raise it again."""
        displaced = self._displaced
        if displaced is not None and self.calls_displaced and not self._has_called_displaced:
            self._has_called_displaced = True
            ctypes.CFUNCTYPE(None, ctypes.c_int)(displaced.handler)(number)

    def uninstall(self) -> None:
        """Restore the earlier handler, unless other code has installed another one since."""
        is_forked = os.getpid() != self._owner
        if self._has_parents_end and not is_forked:
            _replace_parents_end(signal.SIGTERM, signal.SIGINT)
        is_installed = signal.getsignal(signal.SIGTERM) is self
        if not is_installed:
            # A handler that was installed later stays. If it calls this one, this one passes the signal on.
            return
        unregister()
        signal.signal(signal.SIGTERM, self.before or signal.SIG_DFL)
        # SIGTERM should end a forked child, such as a worker, and not call its parent's C code.
        if self._displaced is not None and not is_forked:
            _LIBC.sigaction(signal.SIGTERM, ctypes.byref(self._displaced), None)


def is_raised_by_handler(error: BaseException) -> bool:
    """Return True if a signal handler raised `error`: the training may have been interrupted within a step."""
    handlers: list[Any] = [signal.getsignal(number) for number in signal.valid_signals()]
    # A function has its own code, a bound method its function's, and another callable that of its class's `__call__`.
    codes = {
        getattr(each, "__code__", getattr(type(each).__call__, "__code__", None))
        for each in filter(callable, handlers)
    }
    return any(frame.f_code in codes for frame, _ in walk_tb(error.__traceback__))


def _replace_parents_end(before: signal.Signals, after: signal.Signals) -> bool:
    """Make the kernel send `after` instead of `before` at the parent's death, if it would send `before`."""
    found = ctypes.c_int()
    _LIBC.prctl(_PR_GET_PDEATHSIG, ctypes.byref(found), 0, 0, 0)
    return found.value == before and _LIBC.prctl(_PR_SET_PDEATHSIG, int(after), 0, 0, 0) == 0


def _read_action() -> _Action:
    action = _Action()
    _LIBC.sigaction(signal.SIGTERM, None, ctypes.byref(action))
    return action
