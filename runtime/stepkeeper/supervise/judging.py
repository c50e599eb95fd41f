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
    """Judge why an attempt ended."""
    if end.code == ExitCode.DONE:
        return Verdict(kind=AttemptKind.COMPLETED, cause=None, message="the training is done")
    cause = end.known_cause or judge_exit(end.code, end.message, has_committed=end.has_committed)
    return Verdict(kind=AttemptKind.of(cause), cause=cause, message=_describe(end))


def decide(history: RunHistory, end: AttemptEnd) -> Restart | Finish:
    """Decide by the operator's limits what follows the newest attempt's end."""
    verdict, limits = judge(end), history.limits
    cause, message = verdict.cause, verdict.message
    if cause is None:
        return Finish(code=ExitCode.DONE, why=message)
    if cause == FENCED:
        return Finish(
            code=end.code, why=f"{message}. Stop the other process that uses this root, or use another root"
        )
    if end.is_asked:
        return Finish(code=end.code, why=_describe_stop(end) if end.code == ExitCode.SAVED else message)
    if limits.is_used_up(cause, n_failures=history.n_failures, n_disruptions=history.n_disruptions):
        limit = limits.max_failures if cause == Cause.APPLICATION_ERROR else limits.max_disruptions
        return Finish(
            code=end.code,
            why=f"{message}. No restart is left after {cause}: {limit} are allowed. Fix the cause, and run it again",
        )
    if history.n_starts >= limits.max_starts:
        return Finish(
            code=end.code,
            why=f"{message}. {history.n_starts} starts in a row committed nothing. Fix the cause, and run it again",
        )
    at_s = limits.compute_next_start(
        cause,
        start=end.start_s,
        end=end.end_s,
        n_failures=history.n_failures,
        n_starts=history.n_starts,
    )
    return Restart(cause=cause, at_s=at_s)


def _describe(end: AttemptEnd) -> str:
    """Describe the end by its exit code or signal, and the last line of its error."""
    text = f"exited with code {end.code}"
    if end.code > _BY_SIGNAL and end.code - _BY_SIGNAL in set(signal.Signals):
        text = f"was ended by {signal.Signals(end.code - _BY_SIGNAL).name}"
    lines = (end.message.error or "").strip().splitlines() if end.message is not None else []
    return f"{text}: {lines[-1]}" if lines else text


def _describe_stop(end: AttemptEnd) -> str:
    message = end.message
    if message is not None and message.kind == EndKind.GAVE_UP:
        return f"stopped, but step {message.step} isn't saved. The same command continues from the last checkpoint"
    return "saved and stopped. The same command continues"
