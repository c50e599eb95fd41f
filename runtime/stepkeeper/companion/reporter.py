"""Report the job's progress to the operator, in a thread that no other one waits for except at the end.

Reports go over HTTPS, or to an address of this machine over HTTP, with the pod's token and without proxies.
"""

import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from stepkeeper.contract import (
    CommitPoint,
    ContractError,
    Directive,
    Hang,
    Head,
    Report,
    ReportedCommit,
    ReportPhase,
    TimeSpent,
)
from stepkeeper.contract.report import MAX_COMMITS
from stepkeeper.stacks.pace import Stage

__all__ = ["LogView", "ReportTarget", "Reporter", "TrainerState", "utf8_text"]

_BACK_OFF_FIRST_S: Final = 1.0
_BACK_OFF_MOST_S: Final = 30.0
_TIMEOUT_S: Final = 5.0
_ANSWER_LIMIT_BYTES: Final = 64 * 1024
_THIS_MACHINE: Final = "127.0.0.1"
"""The only host that is sent a token without TLS: `stepkeeper run` listens there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """The trainer's state, as reports carry it."""

    phase: ReportPhase = ReportPhase.STARTING
    step: int | None = None
    step_millis: int | None = None
    in_flight_step: int | None = None
    restored: CommitPoint | None = None
    spent: TimeSpent | None = None
    notice: str | None = None
    error: str | None = None
    metrics: dict[str, str] = field(default_factory=dict)
    stage: Stage | None = None
    """What it does between steps, for the watch on hangs: a call of the manager, or a phase that the training marks."""

    def is_urgent_after(self, before: "TrainerState") -> bool:
        """Return whether this state should be reported at once, not at the next interval."""
        mine = (self.phase, self.restored, self.notice, self.error)
        return mine != (before.phase, before.restored, before.notice, before.error)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogView:
    """The companion's view of the log, as reports carry it."""

    root: str | None = None
    claim: int | None = None
    tail: int = 0
    head: Head | None = None
    error: str | None = None
    """The newest failure of the checks and deletions after a commit."""


def utf8_text(text: str) -> str:
    """Replace characters that UTF-8 can't encode by "?": the operator refuses a report that has them."""
    return text.encode(errors="replace").decode()


class _EndpointError(OSError):
    """Raised when the operator didn't accept a report. Training continues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTarget:
    """The address for reports, and the sender's credential files, which are read again for each report."""

    url: str
    ca_file: str
    token_file: str


class Reporter:
    """Post a report at once when there is news, else once per interval. Back off when there is no answer.

    The first `update_state` starts the thread: an earlier report would show a training that has run for hours
    as starting.
    """

    def __init__(
        self, target: ReportTarget, interval_s: float, on_directive: Callable[[Directive], None]
    ) -> None:
        """Store the arguments; nothing is sent yet. Each answer sets the next interval."""
        self._target = target
        self._interval_s = interval_s
        self._on_directive = on_directive
        self._changed = threading.Condition()
        self._state = TrainerState()
        self._log = LogView()
        self._commits: tuple[ReportedCommit, ...] = ()
        self._stacks: str | None = None
        self._hang: Hang | None = None
        self._news = 1
        """Counts the changes to report at once. The first report is one."""

        self._answered = 0
        """The value of `_news` in the last report that was answered."""

        self._closing = False
        self._started = False

    def update_state(self, state: TrainerState) -> None:
        """Carry `state` in reports from here on; the first report is sent now."""
        with self._changed:
            urgent = state.is_urgent_after(self._state)
            self._state = state
            self._wake(urgent)
            if not self._started:
                self._started = True
                threading.Thread(target=self._run, name="reporter", daemon=True).start()

    def update_log(self, log: LogView, commit: ReportedCommit | None) -> None:
        """Carry `log` in reports from here on, and `commit` until a report with it is answered."""
        with self._changed:
            before = (self._log.claim, self._log.error)
            urgent = commit is not None or (log.claim, log.error) != before
            self._log = log
            if commit is not None:
                self._commits = (*self._commits, commit)[-MAX_COMMITS:]
            self._wake(urgent)

    def add_stacks(self, text: str) -> None:
        """Carry the stacks of all ranks until a report with them is answered. Newer stacks replace them."""
        with self._changed:
            self._stacks = text
            self._wake(urgent=True)

    def set_hang(self, hang: Hang | None) -> None:
        """Carry `hang` in reports from here on; None once the training moves."""
        with self._changed:
            self._hang = hang
            self._wake(urgent=True)

    def await_answer(self, timeout_s: float) -> bool:
        """Wait until the operator has answered a report with the latest news. Return False if time is up."""
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
                directive = _post_report(self._target, report.to_json())
            except _EndpointError as error:
                failures += 1
                if str(error) != complaint:
                    complaint = str(error)
                    text = f"stepkeeper: the operator did not accept a report: {complaint}"
                    print(text, file=sys.stderr, flush=True)  # noqa: T201  # a process's own log
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
                spent=state.spent,
                notice=state.notice,
                error=state.error or (log.error and utf8_text(log.error)),
                metrics=state.metrics,
                # Both would be too long for a report.
                stacks=self._stacks if self._hang is None else None,
                hang=self._hang,
            )

    def _take_answer(self, news: int, report: Report, directive: Directive) -> None:
        """Drop the commits and stacks that `report` carried. Those that came after it stay for the next one."""
        with self._changed:
            self._answered = news
            self._interval_s = directive.report_interval_s
            self._stacks = None if self._stacks == report.stacks else self._stacks
            self._commits = tuple(commit for commit in self._commits if commit not in report.commits)
            self._changed.notify_all()

    def _pause(self, most_s: float, until_news_after: int | None) -> None:
        """Wait for `most_s` seconds, but only until `_news` exceeds a number.

        None backs off after a failure: news doesn't end the wait, but `await_answer` shortens it.
        """
        deadline = time.monotonic() + most_s
        with self._changed:
            while (left_s := deadline - time.monotonic()) > 0:
                if until_news_after is not None and self._news > until_news_after:
                    return
                if self._closing and until_news_after is None:
                    # Try again soon, until `await_answer` gives up.
                    self._changed.wait(min(left_s, 0.1))
                    return
                self._changed.wait(left_s)


def _back_off_s(failures: int) -> float:
    """Double the wait with each failure, and take a random half to all of it: jobs mustn't retry together."""
    full_s = min(_BACK_OFF_MOST_S, _BACK_OFF_FIRST_S * 2.0 ** (failures - 1))
    return full_s * random.uniform(0.5, 1.0)  # noqa: S311  # jitter, no secret


def _post_report(target: ReportTarget, body: bytes) -> Directive:
    """Send a report, and return the operator's answer. Raises _EndpointError unless its status is 200."""
    # A companion without an endpoint starts sooner without these: a restore waits for it.
    import http.client
    import ssl

    parts = urlsplit(target.url)
    is_local = parts.scheme == "http" and parts.hostname == _THIS_MACHINE
    if parts.hostname is None or not (parts.scheme == "https" or is_local):
        raise _EndpointError(f"the endpoint's url {target.url!r} is not https://host[:port]/path")
    try:
        token = Path(target.token_file).read_text(encoding="ascii").strip()
        if is_local:
            connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=_TIMEOUT_S)
        else:
            context = ssl.create_default_context(cafile=target.ca_file)
            connection = http.client.HTTPSConnection(
                parts.hostname, parts.port, timeout=_TIMEOUT_S, context=context
            )
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        try:
            connection.request("POST", parts.path or "/", body=body, headers=headers)
            response = connection.getresponse()
            answer = response.read(_ANSWER_LIMIT_BYTES)
        finally:
            connection.close()
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _EndpointError(f"{target.url}: {type(error).__name__}: {error}") from error
    if response.status != http.HTTPStatus.OK:
        reason = answer[:200].decode(errors="replace")
        raise _EndpointError(f"{target.url}: answered {response.status}: {reason}")
    try:
        return Directive.from_json(answer)
    except ContractError as error:
        raise _EndpointError(f"{target.url}: {error}") from error
