"""Make reports and termination messages of pods, with everything filled in that a test doesn't care for."""

from typing import Any

from stepkeeper.contract import CommitPoint, ExitCode, Head, Report, ReportedCommit, ReportPhase, Termination

__all__ = ["saved_message", "termination_message", "training_report"]


def termination_message(code: int, **more: Any) -> str:
    """Make a termination message."""
    return Termination(code=code, **more).to_json().decode()


def saved_message(sequence: int, step: int) -> str:
    """Make the termination message of a trainer that has committed `step` as `sequence` after SIGTERM."""
    committed = CommitPoint(sequence=sequence, step=step)
    return termination_message(ExitCode.SAVED, notice="sigterm", step=step, root="r", committed=committed)


def training_report(sequence: int, step: int, **more: Any) -> Report:
    """Make the report of a trainer that has just committed `step` as `sequence`. `more` replaces any of its fields."""
    uri = f"gs://bucket/runs/lm/{step}/1-abc"
    commit = ReportedCommit(
        sequence=sequence, step=step, uri=uri, size_bytes=10, duration_millis=5, time_unix_s=1
    )
    base: dict[str, Any] = {
        "phase": ReportPhase.TRAINING,
        "root": "r",
        "tail": sequence,
        "head": Head(sequence=sequence, step=step, uri=uri, size_bytes=10),
        "step": step,
        "commits": (commit,),
    }
    return Report(**(base | more))
