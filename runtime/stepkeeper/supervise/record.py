"""Follow the reports of a run: its steps and commits, where each start resumed, and what was lost. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from stepkeeper.contract import Head, Report, ReportedCommit, ReportPhase
from stepkeeper.quantities import count_text, size_text

__all__ = ["RunRecord", "describe_commit"]

_RUNNING = frozenset({ReportPhase.TRAINING, ReportPhase.SAVING, ReportPhase.DONE})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The course of a run so far. Times are Unix times in seconds."""

    safe_s: float
    """The time up to which no work can be lost: that of the last commit, or of the start of training."""

    is_resumed: bool = False
    """True once the present attempt trains."""

    restored_step: int = 0
    """The step that the present attempt continues after; 0 from scratch."""

    first_step: int | None = None
    """The same of the first attempt that trained."""

    step: int | None = None
    """The last finished step of the present attempt."""

    last_step: int | None = None
    """The last finished step of the attempt before."""

    n_commits: int = 0
    n_attempt_commits: int = 0
    """Commits of the present attempt."""

    sequence: int = -1
    """That of the newest commit of this run."""

    head: Head | None = None
    lost_steps: int = 0
    lost_s: float = 0.0
    """Seconds of steps that were done again, and between two attempts."""

    def on_start(self) -> Self:
        """Return the record at the start of an attempt."""
        return replace(
            self,
            is_resumed=False,
            last_step=self.step if self.step is not None else self.last_step,
            step=None,
            n_attempt_commits=0,
        )

    def on_end(self, step: int | None) -> Self:
        """Return the record at the end of an attempt, whose message has the last finished step."""
        return self if step is None else replace(self, step=max(step, self.step or 0))

    def on_report(self, report: Report, now_s: float) -> tuple[Self, tuple[ReportedCommit, ...]]:
        """Return the record with a report of the present attempt, and its commits that are new."""
        begins = not self.is_resumed and report.phase in _RUNNING
        new = self._resume(report, now_s) if begins else self
        # A report whose answer was lost lists its commits again.
        commits = tuple(commit for commit in report.commits if commit.sequence > new.sequence)
        new = replace(
            new,
            n_commits=new.n_commits + len(commits),
            n_attempt_commits=new.n_attempt_commits + len(commits),
            step=new.step if report.step is None else report.step,
            head=report.head or new.head,
        )
        if commits:
            new = replace(new, sequence=commits[-1].sequence, safe_s=now_s)
        return new, commits

    def _resume(self, report: Report, now_s: float) -> Self:
        """Return the record at the first report of an attempt that trains."""
        restored = 0 if report.restored is None else report.restored.step
        new = replace(self, is_resumed=True, restored_step=restored, safe_s=now_s)
        if self.first_step is None:
            return replace(new, first_step=restored)
        return replace(
            new,
            lost_steps=self.lost_steps + max(0, (self.last_step or 0) - restored),
            lost_s=self.lost_s + now_s - self.safe_s,
        )

    def summarize(self, restarts: Mapping[str, int], *, is_done: bool) -> tuple[str, ...]:
        """Summarize the run in a few lines; `restarts` are counts by cause. `is_done`: the script exited with 0."""
        by_cause = ", ".join(f"{count} {cause}" for cause, count in sorted(restarts.items()))
        n_restarts = sum(restarts.values())
        last = self.step if self.step is not None else self.last_step
        steps = count_text(0 if last is None else last - (self.first_step or 0), "step")
        counts = f"{steps}, {count_text(self.n_commits, 'checkpoint')}, {count_text(n_restarts, 'restart')}"
        lost = f"; lost {count_text(self.lost_steps, 'step')} and {self.lost_s:.0f} s" if n_restarts else ""
        where = "none" if self.head is None else f"step {self.head.step}, {self.head.uri}"
        if is_done and self.head is None and last is None:
            missing = "opened no manager with CheckpointManager.from_env()"
            where = f"none, because the script {missing if self.first_step is None else 'never called manager.step()'}"
        return (f"{counts}{f' ({by_cause})' if by_cause else ''}{lost}", f"last checkpoint: {where}")


def describe_commit(commit: ReportedCommit, step_millis: int | None) -> str:
    """Describe a commit and the pace of the steps, if that is known, in a line."""
    text = f"step {commit.step} committed, {size_text(commit.size_bytes)} in {commit.duration_millis / 1000:.1f} s"
    return f"{text}, {step_millis / 1000:.2f} s/step" if step_millis else text
