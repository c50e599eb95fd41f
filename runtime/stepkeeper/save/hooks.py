"""Report finished saves and restores to Python's logging, and to the training's own hooks."""

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final
from weakref import WeakSet

from stepkeeper.log.foreign_steps import Restorable
from stepkeeper.loggers import logger
from stepkeeper.save.report import SaveReport

__all__ = ["Events", "SaveHook"]

_log: Final = logger("stepkeeper")
_EXIT_S: Final = 5.0
"""When the interpreter ends and the manager wasn't closed, hooks may still run for so long."""

SaveHook = Callable[[SaveReport], object]


class Events:
    """Log saves and restores, and call the hooks of saves.

    Successes are logged at INFO, which stays invisible unless the training turns it on.

    A thread of its own calls the hooks one after the other, in the order of the saves. A hook may take long, or
    call the
    manager: no save waits for it. The thread ends when there are no more reports.
    """

    def __init__(self) -> None:
        self._hooks: list[SaveHook] = []
        self._untold: deque[tuple[SaveReport, tuple[SaveHook, ...]]] = deque()
        self._lock = threading.Lock()
        self._teller: threading.Thread | None = None

    def on_save(self, hook: SaveHook) -> Callable[[], None]:
        """Call `hook` with the report of each save that ends from now on.

        Returns:
            A function that removes the hook.

        """
        self._hooks.append(hook)

        def remove() -> None:
            if hook in self._hooks:
                self._hooks.remove(hook)

        return remove

    def saved(self, report: SaveReport) -> None:
        """Log the end of a save, and pass its report to the hooks' thread."""
        if report.error is not None:
            _log.error("the save of step %d failed: %s", report.step, report.error, extra=_about(report))
        else:
            _log.info(
                "step %d is committed as %s after %.1f s; the training waited %.0f ms for it",
                report.step,
                report.sequence,
                report.duration_s,
                report.stall_s * 1000,
                extra=_about(report),
            )
        hooks = tuple(self._hooks)
        if not hooks:
            return
        with self._lock:
            self._untold.append((report, hooks))
            if self._teller is None:
                # One that hangs keeps no process alive.
                teller = threading.Thread(target=self._tell, name="save-hooks", daemon=True)
                teller.start()
                self._teller = teller
                _telling.add(self)

    def restored(self, record: Restorable | None) -> None:
        """Log that the state now holds `record`; None: there was nothing to restore."""
        if record is None:
            _log.info("nothing to restore: the root holds no commit")
        else:
            _log.info("step %d is restored", record.step, extra={"step": record.step})

    def finish(self, timeout_s: float) -> bool:
        """Wait until all hooks have returned. A call from a hook itself doesn't wait.

        Returns:
            False, after logging it, if a hook was still running after `timeout_s` seconds; else True.

        """
        teller = self._teller
        if teller is None or teller is threading.current_thread():
            return True
        teller.join(max(0.0, timeout_s))
        if teller.is_alive():
            _telling.discard(self)
            _log.warning("a hook for saves is still running after %.1f s: it is not waited for", timeout_s)
        return not teller.is_alive()

    def _tell(self) -> None:
        while (told := self._next()) is not None:
            report, hooks = told
            for hook in hooks:
                try:
                    hook(report)
                except BaseException:  # a hook's fault is not the save's, nor that of other hooks
                    _log.exception("a hook for saves failed on step %d", report.step, extra=_about(report))

    def _next(self) -> tuple[SaveReport, tuple[SaveHook, ...]] | None:
        with self._lock:
            if self._untold:
                return self._untold.popleft()
            self._teller = None
            return None


def _about(report: SaveReport) -> dict[str, object]:
    return {"step": report.step, "save": report}


_telling: Final[WeakSet[Events]] = WeakSet()
"""Objects whose thread may still be calling hooks."""


@atexit.register
def _finish_all() -> None:
    """Wait for the hooks of managers that weren't closed. Their saves have ended by now."""
    ends_s = time.monotonic() + _EXIT_S
    for events in tuple(_telling):
        events.finish(ends_s - time.monotonic())
