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
from stepkeeper.quantities import size_text
from stepkeeper.save.report import SaveReport

__all__ = ["SaveHook", "SaveHooks"]

_log: Final = logger("stepkeeper")
_EXIT_S: Final = 5.0
"""Seconds that hooks may still run when the interpreter ends and the manager wasn't closed."""

SaveHook = Callable[[SaveReport], object]


class SaveHooks:
    """Log saves and restores, and call the hooks of saves.

    Successes are logged at INFO, which is shown in an operator's pod, and elsewhere if the training turns it on. A
    thread calls the hooks in the order of the saves. A hook may take long, or call the manager: no save waits for it.
    """

    def __init__(self) -> None:
        self._hooks: list[SaveHook] = []
        self._unreported: deque[tuple[SaveReport, tuple[SaveHook, ...]]] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def on_save(self, hook: SaveHook) -> Callable[[], None]:
        """Call `hook` with the report of each save that ends from now on. Return a function to remove it."""
        if not callable(hook):
            raise TypeError(f"a hook is a function of a SaveReport, not a {type(hook).__name__}")
        self._hooks.append(hook)

        def remove() -> None:
            if hook in self._hooks:
                self._hooks.remove(hook)

        return remove

    def report_save(self, report: SaveReport) -> None:
        """Log the end of a save, and pass its report to the hooks' thread."""
        if report.error is not None:
            _log.error("the save of step %d failed: %s", report.step, report.error, extra=_log_fields(report))
        else:
            _log.info(
                "step %d is committed as %s (%s) after %.1f s; the training waited %.0f ms for it",
                report.step,
                report.sequence,
                size_text(report.total_bytes or 0),
                report.duration_s,
                report.stall_s * 1000,
                extra=_log_fields(report),
            )
        hooks = tuple(self._hooks)
        if not hooks:
            return
        with self._lock:
            self._unreported.append((report, hooks))
            if self._thread is None:
                # A hook that hangs doesn't keep the process alive.
                thread = threading.Thread(target=self._call_hooks, name="save-hooks", daemon=True)
                thread.start()
                self._thread = thread
                _with_threads.add(self)

    def log_restore(self, record: Restorable | None, uri: str, duration_s: float) -> None:
        """Log that the state now holds `record` of the root at `uri`; None: there was nothing to restore."""
        if record is None:
            _log.info("nothing to restore: %s holds no commit", uri)
        else:
            _log.info(
                "step %d is restored from %s after %.1f s",
                record.step,
                uri,
                duration_s,
                extra={"step": record.step},
            )

    def await_hooks(self, timeout_s: float) -> bool:
        """Wait until all hooks have returned, unless a hook calls this. Return False if time is up."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(max(0.0, timeout_s))
        if thread.is_alive():
            _with_threads.discard(self)
            _log.warning(
                "a hook for saves is still running after %.1f s; not waiting for it any longer", timeout_s
            )
        return not thread.is_alive()

    def _call_hooks(self) -> None:
        while (next_report := self._take_report()) is not None:
            report, hooks = next_report
            for hook in hooks:
                try:
                    hook(report)
                except BaseException:  # a failing hook must not affect the save or other hooks
                    _log.exception(
                        "a hook for saves failed on step %d", report.step, extra=_log_fields(report)
                    )

    def _take_report(self) -> tuple[SaveReport, tuple[SaveHook, ...]] | None:
        with self._lock:
            if self._unreported:
                return self._unreported.popleft()
            self._thread = None
            return None


def _log_fields(report: SaveReport) -> dict[str, object]:
    return {"step": report.step, "save": report}


_with_threads: Final[WeakSet[SaveHooks]] = WeakSet()
"""Objects whose thread may still be calling hooks."""


@atexit.register
def _await_all_hooks() -> None:
    """Wait for the hooks of managers that weren't closed. Their saves have ended by now."""
    ends_s = time.monotonic() + _EXIT_S
    for save_hooks in tuple(_with_threads):
        save_hooks.await_hooks(ends_s - time.monotonic())
