"""The thread that tells the operator how the job is doing. Nothing waits for it."""

import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from stepkeeper.companion.endpoint import EndpointError, ReportTarget, post_report
from stepkeeper.contract import Directive, Head, Report, ReportedCommit, ReportedRestore, ReportPhase
from stepkeeper.contract.report import MAX_COMMITS

__all__ = ["LogView", "Reporter", "TrainerState"]

_BACK_OFF_FIRST_S: Final = 1.0
_BACK_OFF_MOST_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """What the trainer says of itself."""

    phase: ReportPhase = ReportPhase.STARTING
    step: int | None = None
    step_millis: int | None = None
    in_flight_step: int | None = None
    restored: ReportedRestore | None = None
    notice: str | None = None
    error: str | None = None
    metrics: dict[str, str] = field(default_factory=dict)

    def urgent_after(self, before: "TrainerState") -> bool:
        """True if the operator should hear of this at once, not at the next interval."""
        mine = (self.phase, self.restored, self.notice, self.error)
        return mine != (before.phase, before.restored, before.notice, before.error)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogView:
    """What the companion knows of the log."""

    root: str | None = None
    claim: int | None = None
    tail: int = 0
    head: Head | None = None
    error: str | None = None
    """What went wrong after the last commit, in the checks and deletions that no call of the trainer waits for."""


class Reporter:
    """Posts a report at once when there is news, and each interval otherwise; backs off when nobody answers.

    The first `update` starts it: before, it could only say that a training that has run for hours is starting.
    """

    def __init__(
        self, target: ReportTarget, interval_s: float, on_directive: Callable[[Directive], None]
    ) -> None:
        self._target = target
        self._interval_s = interval_s
        self._on_directive = on_directive
        self._changed = threading.Condition()
        self._state = TrainerState()
        self._log = LogView()
        self._commits: tuple[ReportedCommit, ...] = ()
        self._news = 1
        self._answered = 0
        self._closing = False
        self._started = False

    def update(self, state: TrainerState) -> None:
        """Reports from here on carry `state`; the first one is on its way."""
        with self._changed:
            urgent = state.urgent_after(self._state)
            self._state = state
            self._wake(urgent)
            if not self._started:
                self._started = True
                threading.Thread(target=self._run, name="reporter", daemon=True).start()

    def update_log(self, log: LogView, commit: ReportedCommit | None = None) -> None:
        """Reports from here on carry `log`, and `commit` until one of them is answered."""
        with self._changed:
            known = (self._log.claim, self._log.error)
            urgent = commit is not None or (log.claim, log.error) != known
            self._log = log
            if commit is not None:
                self._commits = (*self._commits, commit)[-MAX_COMMITS:]
            self._wake(urgent)

    def flush(self, timeout_s: float) -> bool:
        """True if the operator has answered a report that carries the latest news, before the time was up.

        Also if there never was anything to report.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            if not self._started:
                return True
            while self._answered < self._news:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return False
                self._changed.wait(left_s)
            return True

    def _wake(self, urgent: bool) -> None:
        if urgent:
            self._news += 1
            self._changed.notify_all()

    def _run(self) -> None:
        failures = 0
        complaint = ""
        while True:
            news, report = self._next_report()
            try:
                directive = post_report(self._target, report.to_json())
            except EndpointError as error:
                failures += 1
                if str(error) != complaint:
                    complaint = str(error)
                    print(f"stepkeeper: no report was taken: {complaint}", file=sys.stderr, flush=True)  # noqa: T201  # a process's own log
                self._pause(_back_off_s(failures), until_news_after=None)
                continue
            failures, complaint = 0, ""
            self._take_answer(news, report, directive)
            self._on_directive(directive)
            self._pause(self._interval_s, until_news_after=news)

    def _next_report(self) -> tuple[int, Report]:
        with self._changed:
            state, log = self._state, self._log
            return self._news, Report(
                phase=state.phase,
                root=log.root,
                claim=log.claim,
                tail=log.tail,
                head=log.head,
                step=state.step,
                step_millis=state.step_millis,
                commits=self._commits,
                in_flight_step=state.in_flight_step,
                restored=state.restored,
                notice=state.notice,
                error=state.error or log.error,
                metrics=state.metrics,
            )

    def _take_answer(self, news: int, report: Report, directive: Directive) -> None:
        with self._changed:
            self._answered = news
            self._interval_s = directive.report_interval_s
            self._commits = tuple(commit for commit in self._commits if commit not in report.commits)
            self._changed.notify_all()

    def _pause(self, most_s: float, until_news_after: int | None) -> None:
        """Wait for `most_s`; news ends the wait if `until_news_after` says which are known, closing does always."""
        deadline = time.monotonic() + most_s
        with self._changed:
            while (left_s := deadline - time.monotonic()) > 0:
                if until_news_after is not None and self._news > until_news_after:
                    return
                if self._closing and until_news_after is None:
                    # The last try before the process ends is worth a shorter wait.
                    left_s = min(left_s, 0.1)
                    self._changed.wait(left_s)
                    return
                self._changed.wait(left_s)


def _back_off_s(failures: int) -> float:
    """Doubles with each failure, between half and all of it by chance: many jobs must not return in step."""
    full_s = min(_BACK_OFF_MOST_S, _BACK_OFF_FIRST_S * 2.0 ** (failures - 1))
    return full_s * random.uniform(0.5, 1.0)  # noqa: S311  # jitter, no secret
