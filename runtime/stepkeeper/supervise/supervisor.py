"""Run a training until it is done: start it, follow its reports, pass signals on, and restart it."""

import queue
import secrets
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from stepkeeper.contract import Cause, Endpoint, ExitCode, Rehearsal, Report, RestartLimits, Settings
from stepkeeper.supervise.attempt import Attempt, AttemptPlan
from stepkeeper.supervise.endpoint import REPORT_INTERVAL_S, ReportEndpoint
from stepkeeper.supervise.judging import AttemptEnd, Finish, Restart, RunHistory, decide, judge
from stepkeeper.supervise.record import RunRecord, describe_commit
from stepkeeper.supervise.terminal import RunTerminal

__all__ = ["INTERRUPTED", "RunOptions", "Supervisor", "signals_to"]

INTERRUPTED: Final = 130
"""The exit code after a second Ctrl-C: 128 + SIGINT, as shells have it."""

_NOTICES: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_KILL_MARGIN_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The training to run, and how."""

    command: Sequence[str]
    settings: Settings
    grace_s: int = 30
    limits: RestartLimits = field(default_factory=RestartLimits)
    plans: Sequence[Rehearsal] = ()
    """How each attempt of a rehearsal is disturbed, from the first one on. Later ones are like the last."""

    folder: Path | None = None
    """The folder for the files of all attempts, by their numbers; None: a temporary one."""

    output: Path | None = None
    """The file for the training's output; None: this process's output."""

    is_brief: bool = False
    """True to print no line for each commit, and no summary."""


@dataclass(frozen=True, slots=True)
class _Reported:
    attempt: int
    report: Report


@dataclass(frozen=True, slots=True)
class _Signaled:
    number: int


@dataclass(frozen=True, slots=True)
class _Ended:
    code: int


_Event = _Reported | _Signaled | _Ended


@contextmanager
def signals_to(take: Callable[[int], None]) -> Iterator[None]:
    """Pass the numbers of signals that are notices to `take`, which may be called within a signal handler.

    An ignored SIGINT or SIGHUP stays ignored: a shell does so for commands in the background, and nohup.
    """
    wanted = [number for number in _NOTICES if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda number, _: take(number)) for number in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Supervisor:
    """Supervise one run. Its events come in one queue: reports, signals, and the end of an attempt."""

    def __init__(
        self, options: RunOptions, terminal: RunTerminal, *, now: Callable[[], float] = time.time
    ) -> None:
        self._options, self._terminal, self._now = options, terminal, now
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._history = RunHistory(limits=options.limits)
        self._n_attempts = 0
        self._signals: list[int] = []
        self._is_killed = False
        self._record = RunRecord(safe_s=now())

    def run(self) -> int:
        """Run the training to its end, and return the exit code."""
        # Until the summary is printed: one more Ctrl-C would leave out the rest, and change the exit code.
        with signals_to(lambda number: self._events.put(_Signaled(number))):
            finish = self._run_attempts()
            self._terminal.print_line(finish.why)
            is_done = finish.code == ExitCode.DONE
            lines = self._record.summarize(self._history.restarts, is_done=is_done)
            for line in () if self._options.is_brief else lines:
                self._terminal.print_line(line)
        return finish.code

    def _run_attempts(self) -> Finish:
        token = secrets.token_hex(16)
        with (
            tempfile.TemporaryDirectory(prefix="stepkeeper-run-", ignore_cleanup_errors=True) as temporary,
            ReportEndpoint(
                token, lambda number, report: self._events.put(_Reported(number, report))
            ) as endpoint,
        ):
            folder = self._options.folder or Path(temporary)
            while True:
                self._n_attempts += 1
                plan = self._plan(folder, token, endpoint)
                finish = self._follow(self._run_attempt(plan))
                if finish is not None:
                    return finish

    def _plan(self, folder: Path, token: str, endpoint: ReportEndpoint) -> AttemptPlan:
        options, number = self._options, self._n_attempts
        address = Endpoint(url=endpoint.url_of(number), report_interval_s=REPORT_INTERVAL_S)
        return AttemptPlan(
            number=number,
            command=options.command,
            folder=folder / str(number),
            settings=replace(options.settings, endpoint=address),
            token=token,
            grace_s=options.grace_s,
            rehearsal=options.plans[min(number, len(options.plans)) - 1] if options.plans else None,
            output=options.output,
        )

    def _run_attempt(self, plan: AttemptPlan) -> AttemptEnd:
        start_s = self._now()
        self._history, self._record = self._history.on_start(), self._record.on_start()
        attempt = Attempt(plan, lambda code: self._events.put(_Ended(code)))
        code = self._follow_attempt(attempt)
        end_s = self._now()
        message = attempt.clean_up()
        self._record = self._record.on_end(None if message is None else message.step)
        return AttemptEnd(
            code=code if code >= 0 else 128 - code,
            message=message,
            start_s=start_s,
            end_s=end_s,
            has_committed=self._record.n_attempt_commits > 0,
            is_asked=bool(self._signals),
            known_cause=Cause.SPOT_PREEMPTION if attempt.was_preempted else None,
        )

    def _follow_attempt(self, attempt: Attempt) -> int:
        """Take events until the attempt has ended, and return the launcher's code. Kill it when its time is over."""
        kill_s: float | None = None
        while True:
            try:
                event = self._events.get(timeout=None if kill_s is None else max(0.0, kill_s - self._now()))
            except queue.Empty:
                self._terminal.print_line(f"not stopped in {self._options.grace_s} s: killing it")
                attempt.kill()
                kill_s = None
                continue
            match event:
                case _Ended(code):
                    return code
                case _Reported(number, report) if number == self._n_attempts:
                    self._take_report(report)
                case _Reported():
                    pass
                case _Signaled(number):
                    if self._is_second_interrupt(number):
                        self._is_killed = True
                        attempt.kill()
                    elif not self._signals:
                        kill_s = self._now() + self._options.grace_s + _KILL_MARGIN_S
                        attempt.notify()
                        self._announce_stop(number)
                    self._signals.append(number)

    def _take_report(self, report: Report) -> None:
        was_training = self._record.is_resumed
        self._record, commits = self._record.on_report(report, self._now())
        if self._record.is_resumed and not was_training:
            step = self._record.restored_step
            self._terminal.print_line(f"training {f'continues after step {step}' if step else 'begins'}")
        for commit in commits:
            self._history = self._history.on_commit()
            if not self._options.is_brief:
                self._terminal.print_line(describe_commit(commit, report.step_millis))

    def _is_second_interrupt(self, number: int) -> bool:
        return number == signal.SIGINT and signal.SIGINT in self._signals

    def _announce_stop(self, number: int) -> None:
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        again = "; again to end at once" if number == signal.SIGINT else ""
        self._terminal.print_line(f"{name}: saving and stopping{again}")

    def _follow(self, end: AttemptEnd) -> Finish | None:
        """Return the end of the run, or wait until the next attempt may begin and return None."""
        if self._is_killed:
            return Finish(code=INTERRUPTED, why="ended at once")
        match decide(self._history, end):
            case Finish() as finish:
                return finish
            case Restart(cause=cause, at_s=at_s):
                pass
        wait_s = 0.0 if at_s is None else max(0.0, at_s - self._now())
        when = f"in {wait_s:.0f} s" if wait_s else "at once"
        self._terminal.print_line(f"{judge(end).message} ({cause}): restart {when}")
        if not self._wait_until(at_s):
            return Finish(code=ExitCode.SAVED, why="stopped before the restart. The same command continues")
        self._history = self._history.on_restart(cause)
        return None

    def _wait_until(self, at_s: float | None) -> bool:
        """Wait for the time of the next start. Return False if a signal came first."""
        while True:
            left_s = 0.0 if at_s is None else max(0.0, at_s - self._now())
            try:
                event = self._events.get(timeout=left_s)
            except queue.Empty:
                return True
            if isinstance(event, _Signaled):
                return False
