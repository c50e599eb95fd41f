"""Follow the reports of a run: its steps and commits, where each start resumed, and what was lost. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from stepkeeper.contract import Head, Report, ReportedCommit, ReportPhase
from stepkeeper.quantities import size_text

__all__ = ["RunRecord"]

_RUNNING = frozenset({ReportPhase.TRAINING, ReportPhase.SAVING, ReportPhase.DONE})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The course of a run so far. Times are Unix times in seconds."""

    start_s: float
    """The time at which the present attempt began."""

    is_resumed: bool = False
    """True once the present attempt trains."""

    first_step: int | None = None
    """The step that the first attempt resumed from, 0 from scratch."""

    step: int | None = None
    """The last finished step of the present attempt."""

    step_millis: int | None = None
    metrics: Mapping[str, str] | None = None
    last_step: int | None = None
    """The last finished step of the attempt before."""

    safe_s: float | None = None
    """The time until which nothing can be lost: of the last commit, or of the attempt's beginning."""

    n_commits: int = 0
    n_attempt_commits: int = 0
    """Commits of the present attempt."""

    sequence: int = -1
    """That of the newest commit of this run."""

    head: Head | None = None
    lost_steps: int = 0
    lost_s: float = 0.0
    """Seconds of steps that were done again, and between two attempts."""

    def on_start(self, now_s: float) -> Self:
        """Begin an attempt. All of the time since the last commit of the one before is lost, up to the resume."""
        return replace(
            self,
            start_s=now_s,
            is_resumed=False,
            last_step=self.step if self.step is not None else self.last_step,
            step=None,
            metrics=None,
            n_attempt_commits=0,
            safe_s=now_s if self.safe_s is None else self.safe_s,
        )

    def on_report(self, report: Report, now_s: float) -> tuple[Self, tuple[str, ...]]:
        """Return the record with a report of the present attempt, and the lines to print about its news."""
        lines: list[str] = []
        new = self
        if not new.is_resumed and report.phase in _RUNNING:
            new, line = new._resume(report, now_s)
            lines.append(line)
        fresh = [commit for commit in report.commits if commit.sequence > new.sequence]
        for commit in fresh:
            lines.append(_describe_commit(commit))
            new = replace(new, sequence=commit.sequence, safe_s=now_s)
        n_fresh = len(fresh)
        return (
            replace(
                new,
                n_commits=new.n_commits + n_fresh,
                n_attempt_commits=new.n_attempt_commits + n_fresh,
                step=new.step if report.step is None else report.step,
                step_millis=new.step_millis if report.step_millis is None else report.step_millis,
                metrics=report.metrics or new.metrics,
                head=report.head or new.head,
            ),
            tuple(lines),
        )

    def _resume(self, report: Report, now_s: float) -> tuple[Self, str]:
        """Return the record at the first report of a training attempt, and a line about what that continues."""
        restored = 0 if report.restored is None else report.restored.step
        new = replace(self, is_resumed=True)
        if self.first_step is None:
            new = replace(new, first_step=restored, safe_s=now_s)
        else:
            lost = max(0, (self.last_step or 0) - restored)
            safe_s = self.start_s if self.safe_s is None else self.safe_s
            new = replace(new, lost_steps=self.lost_steps + lost, lost_s=self.lost_s + now_s - safe_s, safe_s=now_s)
        if report.restored is None:
            return new, "training begins from scratch"
        return new, f"training continues after step {restored}"

    def describe_progress(self) -> str | None:
        """Describe the last finished step in a short line; None before the first one."""
        if self.step is None:
            return None
        parts = [f"step {self.step}"]
        if self.step_millis:
            parts.append(f"{self.step_millis / 1000:.2f} s/step")
        parts += [f"{name} {value[:8]}" for name, value in list((self.metrics or {}).items())[:3]]
        return ", ".join(parts)

    def summarize(self, restarts: Mapping[str, int]) -> tuple[str, ...]:
        """Summarize the run in a few lines; `restarts` are counts by cause."""
        by_cause = ", ".join(f"{count} {cause}" for cause, count in sorted(restarts.items()))
        n_restarts = sum(restarts.values())
        last = self.step if self.step is not None else self.last_step
        steps = 0 if last is None else last - (self.first_step or 0)
        counts = f"{steps} steps, {self.n_commits} checkpoints, {n_restarts} restarts"
        lost = f"; lost {self.lost_steps} steps and {self.lost_s:.0f} s" if n_restarts else ""
        where = "none" if self.head is None else f"step {self.head.step}, {self.head.uri}"
        return (f"{counts}{f' ({by_cause})' if by_cause else ''}{lost}", f"last checkpoint: {where}")


def _describe_commit(commit: ReportedCommit) -> str:
    return f"step {commit.step} committed, {size_text(commit.size_bytes)} in {commit.duration_millis / 1000:.1f} s"
