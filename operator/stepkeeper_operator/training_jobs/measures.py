"""Derive the gauges of a job from its status."""

from collections.abc import Iterator

from stepkeeper_operator.api.v1alpha1.conditions import END_CONDITIONS, ConditionStatus
from stepkeeper_operator.api.v1alpha1.trainingjob_status import GoodputStatus, TrainingJobStatus
from stepkeeper_operator.metrics import JobSample

__all__ = ["find_recovery", "measure_job"]


def measure_job(status: TrainingJobStatus, recovery_s: float | None) -> Iterator[JobSample]:
    """Yield the samples of a job. `recovery_s`: the time of its last recovery; None if none was seen."""
    if status.phase is not None:
        yield "job_phase", 1, (status.phase.value,)
    for each in status.conditions:
        yield "job_condition", 1, (each.type, each.status.value, each.reason)
    for cause in status.restarts.by_cause:
        yield "job_restarts", cause.count, (cause.cause,)
    if recovery_s is not None:
        yield "job_recovery_seconds", recovery_s, ()
    yield from _measure_progress(status)
    if status.goodput is not None:
        yield from _measure_goodput(status.goodput)


def find_recovery(
    known: tuple[int, float] | None, before: TrainingJobStatus, after: TrainingJobStatus, *, now: float
) -> tuple[int, float] | None:
    """Return the number of the last attempt, if its first step is new, and the seconds since the end before it.

    Without such a step, return `known`.
    """
    ended, last = after.attempts[-2:] if len(after.attempts) > 1 else (None, None)
    if last is None or last.to_step is None or ended is None or ended.end is None:
        return known
    is_known = known is not None and known[0] >= last.number
    if is_known or any(each.number == last.number and each.to_step is not None for each in before.attempts):
        return known
    return last.number, now - ended.end


def _measure_progress(status: TrainingJobStatus) -> Iterator[JobSample]:
    ended = any(c.type in END_CONDITIONS and c.status is ConditionStatus.TRUE for c in status.conditions)
    progress, latest = status.progress, status.checkpoint.latest if status.checkpoint is not None else None
    if progress is not None and progress.last_progress_time is not None and not ended:
        yield "job_step_age_seconds", progress.last_progress_time, ()
    if latest is not None and latest.time is not None and not ended:
        yield "job_commit_age_seconds", latest.time, ()
    if latest is not None and latest.duration_millis is not None:
        yield "job_save_seconds", latest.duration_millis / 1000, ()


def _measure_goodput(goodput: GoodputStatus) -> Iterator[JobSample]:
    seconds = goodput.model_dump(exclude={"percent", "lost_steps"})
    yield "job_goodput_seconds", seconds.pop("productive_seconds") or 0, ()
    for name, n in seconds.items():
        yield "job_badput_seconds", n or 0, (name.removesuffix("_seconds"),)
    yield "job_lost_steps", goodput.lost_steps or 0, ()
