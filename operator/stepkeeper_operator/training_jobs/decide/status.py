"""Derive the checkpoint and progress parts of the status from reports and pods, deterministically.

A root is one storage log, named by the nonce of its first entry. The log has numbered slots: `sequence` is the slot of
a commit, `tail` the newest slot, and `head` the commit that the next attempt resumes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from stepkeeper.contract import CommitPoint, Head, ReportedCommit
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.api.v1alpha1.trainingjob_status import (
    MAX_RECENT,
    CheckpointStatus,
    CommitStatus,
    Metric,
    ProgressStatus,
    RestoredStatus,
)
from stepkeeper_operator.cache.reports import LastReport, has_advanced
from stepkeeper_operator.facts.queued_resource import QueuedMachines
from stepkeeper_operator.training_jobs.attempts.attempt_pods import find_current_report, is_of_start
from stepkeeper_operator.training_jobs.attempts.history import JobHistory
from stepkeeper_operator.training_jobs.observed import Observed, View

__all__ = ["Mirror", "clear_previous_attempt", "derive_progress", "mirror_storage", "show_autocheckpoint"]

_TEXT_LIMIT: Final = 64
_MAX_ETA_S: Final = 2**53
"""The API cannot store much larger numbers exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mirror:
    """The committed checkpoints that pods reported."""

    checkpoint: CheckpointStatus | None
    new_commit: bool
    """True if the job has made a commit that is not in the status yet."""


def mirror_storage(
    job: CheckpointedTrainingJob, observed: Observed, *, running: tuple[int, int] | None
) -> Mirror:
    """Derive the checkpoint part of the status. `running` is the ordinal of the present attempt."""
    before, attempts = job.status.checkpoint or CheckpointStatus(), job.status.attempts
    finals, report = _find_final_commits(observed, before), observed.report
    if any(_supersedes(final, report) for final in finals):
        report = None  # the job has another root since
    after = before
    if report is not None:
        # An attempt after a suspension has the ordinal of the one before it.
        resumed = job.status.operator.resumed_at is not None
        of_last = not attempts or is_of_start(report, attempts[-1], resumed=resumed)
        after = _mirror_report(after, report, current=report.ordinal == running and of_last)
    for final in finals:
        if report is None or report.report.root in {None, final.root}:  # the report names the present root
            after = _mirror_final_commit(after, job, final)
    new_commit = _has_new_commit(before, report, finals)
    return Mirror(checkpoint=None if after == CheckpointStatus() else after, new_commit=new_commit)


def clear_previous_attempt(
    view: View, checkpoint: CheckpointStatus | None, history: JobHistory
) -> CheckpointStatus | None:
    """Remove the previous attempt's save in flight and restored commit, unless the new attempt has already reported."""
    previous = view.job.status.attempts[-1].number if view.job.status.attempts else 0
    opened = history.last_attempt is not None and history.last_attempt.number != previous
    reported = find_current_report(view.observed, history) is not None
    if checkpoint is None or not opened or reported:
        return checkpoint
    return checkpoint.model_copy(update={"in_flight_step": None, "restored": None})


def show_autocheckpoint(
    checkpoint: CheckpointStatus | None, machines: QueuedMachines | None
) -> CheckpointStatus | None:
    """Add the autocheckpoint setting of the job's machines to the checkpoint part."""
    setting = None if machines is None else machines.autocheckpoint_setting
    shown = (checkpoint or CheckpointStatus()).model_copy(update={"autocheckpoint": setting})
    return None if shown == CheckpointStatus() else shown


def derive_progress(view: View, history: JobHistory) -> ProgressStatus | None:
    """Derive the progress part of the status."""
    return _add_trainer_status(view, history, _derive_reported_progress(view, history))


def _derive_reported_progress(view: View, history: JobHistory) -> ProgressStatus | None:
    """Derive it from the companion's reports and the ends of attempts."""
    before, observed = view.job.status.progress, view.observed
    if observed.report is None:
        return _show_last_step(view.job, before, history)
    # A field that the report lacks keeps its value.
    report, before = observed.report.report, before or ProgressStatus()
    current = find_current_report(observed, history)
    step, moved_at = before.step, before.last_progress_time
    if has_advanced(report.step, before.step):
        # The status is written less often than reports arrive: the newest one may show no change.
        moved_at = int((current and current.moved_at) or observed.report.received_at)
        step = report.step
    elif current is not None and report.step is not None:
        # The attempt has resumed there. Of the attempt before, the status may show a later step than its last report.
        step = report.step
    reported = ProgressStatus(
        step_millis=report.step_millis or before.step_millis,
        slowest_rank=report.ranks.slowest if report.ranks is not None else before.slowest_rank,
        metrics=_convert_metrics(report.metrics) or before.metrics,
    )
    return _show_last_step(view.job, _show_step(view.job, reported, step, moved_at), history)


def _add_trainer_status(
    view: View, history: JobHistory, progress: ProgressStatus | None
) -> ProgressStatus | None:
    """Add what the attempt's trainer reports by itself, where the companion's reports have nothing.

    A share is no step: the training isn't judged by it.
    """
    status, report, shown = view.observed.trainer_status, view.observed.report, view.job.status.progress
    is_current = status is not None and status.ordinal == history.ordinal
    if status is None or (shown is None and not is_current):
        return progress
    known = progress or ProgressStatus()
    update: dict[str, object] = {}
    if known.step is None or not view.job.spec.total_steps:
        # transformers posts 0 % before it resumes. Its later estimates count the steps of earlier starts as this one's.
        has_moved = is_current and (status.percent or status.remaining_s is not None)
        percent = status.percent if has_moved or shown is None else shown.percent or status.percent
        is_first = is_current and history.ordinal == (0, 0)
        update = {"percent": percent, **_describe_eta(status.remaining_s if is_first else None)}
        if known.step is None and percent is not None:
            update["display"] = f"{percent}%"
    if is_current and status.metrics and (report is None or not report.report.metrics):
        update["metrics"] = _convert_metrics(status.metrics)
    return known.model_copy(update=update)


def _show_last_step(
    job: CheckpointedTrainingJob, progress: ProgressStatus | None, history: JobHistory
) -> ProgressStatus | None:
    """Show the last step of an ended attempt, which its pods may name only after the last report."""
    last, known = history.last_attempt, progress or ProgressStatus()
    if last is None or last.end is None or not has_advanced(last.to_step, known.step):
        return progress
    return _show_step(job, known, last.to_step, last.end)


def _show_step(
    job: CheckpointedTrainingJob, progress: ProgressStatus, step: int | None, moved_at: int | None
) -> ProgressStatus:
    """Return the progress at `step`, with the share and the time that remain of `totalSteps`."""
    total, step_ms = job.spec.total_steps, progress.step_millis
    left = None if step is None or total is None else max(0, total - step)
    eta_s = None if left is None or step_ms is None else left * step_ms // 1000
    update = {
        "step": step,
        "display": None if step is None else f"{step}/{total}" if total else str(step),
        "percent": None if step is None or not total else min(100, 100 * step // total),
        "last_progress_time": moved_at,
        **_describe_eta(eta_s),
    }
    return progress.model_copy(update=update)


def _describe_eta(eta_s: int | None) -> dict[str, object]:
    if eta_s is None:
        return {"eta_seconds": None, "eta": None}
    eta_s = min(_MAX_ETA_S, eta_s)
    return {"eta_seconds": eta_s, "eta": _describe_duration(eta_s)}


def _describe_duration(duration_s: int) -> str:
    """Describe a duration in minutes and greater units, rounded up."""
    days, minutes = divmod(-(-duration_s // 60), 1440)
    hours, minutes = divmod(minutes, 60)
    return f"{days}d{hours:02}h" if days else f"{hours}h{minutes:02}m" if hours else f"{minutes}m"


def _mirror_report(status: CheckpointStatus, last: LastReport, *, current: bool) -> CheckpointStatus:
    report = last.report
    update: dict[str, object] = {}
    if report.root is not None:
        new_root = report.root != status.root
        if new_root or report.tail > (status.tail or 0):
            # Without a HEAD there is no commit to resume: the root is new, or its only commits turned out to be bad.
            update["latest"] = None if report.head is None else _find_latest(report.head, last)
        update["root"] = report.root
        update["tail"] = report.tail if new_root else max(report.tail, status.tail or 0)
        recent = {commit.sequence: commit for commit in (() if new_root else status.recent)}
        recent |= {commit.sequence: _convert_commit(commit) for commit in last.commits}
        newest = [recent[sequence] for sequence in sorted(recent)[-MAX_RECENT:]]
        update["recent"] = _find_longest_save(newest, update.get("latest", status.latest))
    if current:
        update["in_flight_step"], update["restored"] = report.in_flight_step, None
        if (restored := report.restored) is not None:
            update["restored"] = RestoredStatus(sequence=restored.sequence, step=restored.step)
    return status.model_copy(update=update)


def _find_longest_save(commits: list[CommitStatus], latest: object) -> tuple[CommitStatus, ...]:
    """Return the commit whose save took longest, which `GraceSufficient` needs; nothing if it is the latest."""
    longest = max(commits, key=lambda commit: (commit.duration_millis or 0, commit.sequence), default=None)
    return () if longest is None or longest == latest else (longest,)


def _find_latest(head: Head, last: LastReport) -> CommitStatus:
    for commit in reversed(last.commits):
        if commit.sequence == head.sequence:
            return _convert_commit(commit)
    return CommitStatus(sequence=head.sequence, step=head.step, uri=head.uri, size_bytes=head.size_bytes)


def _convert_commit(commit: ReportedCommit) -> CommitStatus:
    return CommitStatus(
        sequence=commit.sequence,
        step=commit.step,
        uri=commit.uri,
        time=commit.time_unix_s,
        size_bytes=commit.size_bytes,
        duration_millis=commit.duration_millis,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _FinalCommit:
    """The newest commit of a process, from its termination message. It may be newer than the last report."""

    root: str
    commit: CommitPoint
    ordinal: tuple[int, int]
    reported_at: float
    """Unix time of the process's end; 0 if it is unknown, so that every report of its attempt counts as newer."""


def _find_final_commits(observed: Observed, status: CheckpointStatus) -> tuple[_FinalCommit, ...]:
    """Find the commits in termination messages, however the processes ended.

    An edit of the uri gives the job another root. A commit in another root than that of the status counts only if it is
    of the newest attempt, and newer than the last report.
    """
    newest = max((evidence.ordinal for evidence in observed.evidence), default=(0, 0))
    if observed.report is not None:
        newest = max(newest, observed.report.ordinal)
    found = []
    for evidence in observed.evidence:
        for pod in evidence.pods:
            last = pod.termination
            if last is None or last.root is None or last.committed is None:
                continue
            final = _FinalCommit(
                root=last.root,
                commit=last.committed,
                ordinal=evidence.ordinal,
                reported_at=0.0 if pod.finished_at is None else pod.finished_at,
            )
            in_new_root = final.ordinal == newest and _supersedes(final, observed.report)
            if status.root in {None, final.root} or in_new_root:
                found.append(final)
    return tuple(found)


def _supersedes(final: _FinalCommit, report: LastReport | None) -> bool:
    """Return True if the final commit is newer than the report and in another root, or there is no report."""
    if report is None:
        return True
    newer = (final.ordinal, final.reported_at) > (report.ordinal, report.received_at)
    return newer and report.report.root != final.root


def _mirror_final_commit(
    status: CheckpointStatus, job: CheckpointedTrainingJob, final: _FinalCommit
) -> CheckpointStatus:
    """Add a commit that only a termination message names, because it was made after the last report.

    A commit in a slot up to the tail is not added: a report has covered its slot, and may have left it out because the
    commit is bad. The tail itself is kept, so that the next report still sets `latest`.
    """
    if final.root != status.root:
        status = status.model_copy(update={"root": final.root, "tail": None, "latest": None, "recent": ()})
    if final.commit.sequence <= _find_newest_sequence(status, final.root, tail=True):
        return status
    latest = CommitStatus(sequence=final.commit.sequence, step=final.commit.step, uri=job.spec.checkpoint.uri)
    return status.model_copy(update={"latest": latest})


def _has_new_commit(
    before: CheckpointStatus, last: LastReport | None, finals: tuple[_FinalCommit, ...]
) -> bool:
    """Return True if the job has made a commit that is not in the status. Restored commits are no progress.

    The root in the status belongs to the job, so a later HEAD of it is a new commit too. Another root may contain
    earlier commits.
    """
    for final in finals:
        if final.commit.sequence > _find_newest_sequence(before, final.root, tail=True):
            return True
    if last is None or last.report.root is None:
        return False
    root, head = last.report.root, last.report.head
    sequences = [commit.sequence for commit in last.commits]
    if head is not None and root == before.root and last.report.tail > (before.tail or 0):
        sequences.append(head.sequence)
    return max(sequences, default=-1) > _find_newest_sequence(before, root, tail=False)


def _find_newest_sequence(status: CheckpointStatus, root: str, *, tail: bool) -> int:
    """Find the newest commit of `root` in the status, or with `tail` its newest slot; -1, before all, if none is."""
    if status.root != root:
        return -1
    latest = -1 if status.latest is None else status.latest.sequence
    slot = status.tail if tail and status.tail is not None else -1
    return max(latest, slot, *(commit.sequence for commit in status.recent))


def _convert_metrics(metrics: Mapping[str, str]) -> tuple[Metric, ...]:
    return tuple(
        Metric(name=name[: _TEXT_LIMIT - 1], value=value[:_TEXT_LIMIT])
        for name, value in sorted(metrics.items())
        if name
    )
