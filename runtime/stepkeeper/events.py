"""What becomes of saves and restores, as Python's logging and the training's own hooks are told of it."""

from collections.abc import Callable
from typing import Final

from stepkeeper.legacy import Restorable
from stepkeeper.loggers import logger
from stepkeeper.save_report import SaveReport

__all__ = ["Events", "SaveHook"]

_log: Final = logger("stepkeeper")

SaveHook = Callable[[SaveReport], None]


class Events:
    """What goes well is told at INFO, which nobody sees who hasn't asked for it."""

    def __init__(self) -> None:
        self._hooks: list[SaveHook] = []

    def on_save(self, hook: SaveHook) -> Callable[[], None]:
        """`hook` is called with each save's report; what is answered takes it away again."""
        self._hooks.append(hook)

        def remove() -> None:
            if hook in self._hooks:
                self._hooks.remove(hook)

        return remove

    def saved(self, report: SaveReport) -> None:
        """A save has ended. In the saver's thread: what a hook raises is logged, no more."""
        extra = {"step": report.step, "save": report}
        if report.error is not None:
            _log.error("the save of step %d failed: %s", report.step, report.error, extra=extra)
        else:
            _log.info(
                "step %d is committed as %s after %.1f s; the training waited %.0f ms for it",
                report.step,
                report.sequence,
                report.duration_s,
                report.stall_s * 1000,
                extra=extra,
            )
        for hook in tuple(self._hooks):
            try:
                hook(report)
            except Exception:  # a hook's fault is not the save's
                _log.exception("a hook for saves failed on step %d", report.step, extra=extra)

    def restored(self, record: Restorable | None) -> None:
        """The state is what `record` holds; None: there was none."""
        if record is None:
            _log.info("nothing to restore: the root holds no commit")
        else:
            _log.info("step %d is restored", record.step, extra={"step": record.step})
