"""Decide what follows the end of an attempt (one start of the training): a restart, or the end of the run. Pure."""

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Self

from stepkeeper.contract import (
    FENCED,
    AttemptKind,
    Cause,
    EndKind,
    ExitCode,
    RestartLimits,
    Termination,
    Verdict,
    is_disruption,
    judge_exit,
)

__all__ = ["AttemptEnd", "Finish", "Restart", "RunHistory", "decide", "judge"]

_BY_SIGNAL: Final = 128
_KILLED: Final = frozenset({_BY_SIGNAL + signal.SIGTERM, _BY_SIGNAL + signal.SIGKILL})
"""Exit codes of a launcher that was killed before it had begun, or after its time."""

_FAILURE: Final = 1

_STOPPED_WITH_0: Final = (
    "stopped with code 0, and no manager was closed: open it in a `with` block, or close it. The same command "
    "continues"
)
"""The end of a script that may have stopped early: a manager that is closed reports a training that is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnd:
    """The end of an attempt, as this machine shows it."""

    code: int
    """The launcher's exit code, or 128 and the number of the signal that killed it."""

    start_s: float
    """Unix time at which the attempt began."""

    end_s: float
    """Unix time at which it ended."""

    message: Termination | None = None
    """The termination message, if the training wrote one."""

    has_committed: bool = False
    is_asked: bool = False
    """True if this command asked the training to stop, for a signal of its own."""

    known_cause: Cause | None = None
    """The cause of an end that this command brought about itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHistory:
    """The restarts of a run so far, as the limits count them."""

    limits: RestartLimits
    restarts: Mapping[str, int] = field(default_factory=dict)
    """The number of restarts by cause."""

    n_failures: int = 0
    """Restarts after failures of the application since the last new commit."""

    n_starts: int = 0
    """Starts in a row without a new commit."""

    def on_start(self) -> Self:
        """Return the history with one more start."""
        return replace(self, n_starts=self.n_starts + 1)

    def on_commit(self) -> Self:
        """Return the history after a new commit, which refills the budget of failures."""
        return replace(self, n_failures=0, n_starts=0)

    def on_restart(self, cause: str) -> Self:
        """Return the history with a restart after an end by `cause`."""
        counts = {**self.restarts, cause: self.restarts.get(cause, 0) + 1}
        return replace(self, restarts=counts, n_failures=self.n_failures + (cause == Cause.APPLICATION_ERROR))

    @property
    def n_disruptions(self) -> int:
        """The restarts after disruptions."""
        return sum(count for cause, count in self.restarts.items() if is_disruption(cause))


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """The training is to be started again."""

    cause: str
    at_s: float | None
    """Unix time of the next start; None: at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The run ends with an exit code."""

    code: int
    why: str


def judge(end: AttemptEnd) -> Verdict:
    """Judge why an attempt ended. A program that ends itself after a notice may exit with 0 too, and isn't done."""
    if end.code == ExitCode.DONE and not _has_had_notice(end):
        return Verdict(kind=AttemptKind.COMPLETED, cause=None, message="the training is done")
    cause = end.known_cause or judge_exit(
        end.code or ExitCode.SAVED, end.message, has_committed=end.has_committed
    )
    return Verdict(kind=AttemptKind.of(cause), cause=cause, message=_describe(end))


def decide(history: RunHistory, end: AttemptEnd) -> Restart | Finish:
    """Decide by the operator's limits what follows the newest attempt's end."""
    verdict = judge(end)
    if verdict.cause is None:
        return Finish(code=ExitCode.DONE, why=verdict.message)
    if end.is_asked:
        stopped = end.code in {ExitCode.DONE, ExitCode.SAVED, *_KILLED}
        return Finish(
            code=ExitCode.SAVED if stopped else end.code,
            why=_describe_stop(end) if stopped else verdict.message,
        )
    if reason := _explain_limit(history, verdict.cause):
        # 75 would ask for a restart, and 0 mean that the training is done.
        code = _FAILURE if end.code in {ExitCode.DONE, ExitCode.SAVED} else end.code
        return Finish(code=code, why=f"{verdict.message}. {reason}")
    at_s = history.limits.compute_next_start(
        verdict.cause,
        start=end.start_s,
        end=end.end_s,
        n_failures=history.n_failures,
        n_starts=history.n_starts,
    )
    return Restart(cause=verdict.cause, at_s=at_s)


def _has_had_notice(end: AttemptEnd) -> bool:
    """Return True if the training had a notice. Without its message, only those of this command are known."""
    if end.message is None:
        return end.is_asked or end.known_cause is not None
    return end.message.notice is not None


def _explain_limit(history: RunHistory, cause: str) -> str | None:
    """Explain why no restart follows an end by `cause`; None if one does."""
    limits = history.limits
    if cause == FENCED:
        return "Stop the other process that uses this root, or use another root"
    if limits.is_used_up(cause, n_failures=history.n_failures, n_disruptions=history.n_disruptions):
        n_allowed = limits.max_failures if cause == Cause.APPLICATION_ERROR else limits.max_disruptions
        return f"No restart is left after {cause}: {n_allowed} are allowed. Fix the cause, and run it again"
    if history.n_starts >= limits.max_starts:
        return f"{history.n_starts} starts in a row committed nothing. Fix the cause, and run it again"
    return None


def _describe(end: AttemptEnd) -> str:
    """Describe the end by its exit code or signal, and its error in one line."""
    text = f"exited with code {end.code}"
    if end.code > _BY_SIGNAL and end.code - _BY_SIGNAL in set(signal.Signals):
        text = f"was ended by {signal.Signals(end.code - _BY_SIGNAL).name}"
    line = "" if end.message is None else end.message.error_line.removesuffix(".")
    return f"{text}: {line}" if line else text


def _describe_stop(end: AttemptEnd) -> str:
    is_saved = end.message is not None and end.message.kind in {EndKind.DONE, EndKind.SAVED}
    if end.code == ExitCode.DONE and end.message is None:
        return _STOPPED_WITH_0
    # SIGTERM kills a launcher only before it has begun: afterwards it passes the signal on.
    if end.code == _BY_SIGNAL + signal.SIGTERM or (is_saved and end.message and end.message.step is None):
        return "stopped before it finished a step. The same command continues"
    if not is_saved:
        return "stopped, but the last step isn't saved. The same command continues from the last checkpoint"
    return "saved and stopped. The same command continues"
