"""Keep the newest report of each job, its recent commits, and the answer to its next report."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from stepkeeper.contract import Directive, Report, ReportedCommit
from stepkeeper_operator.api.v1alpha1.trainingjob_status import SaveRequest

__all__ = ["LastReport", "ReportCache", "TrainerStatus", "has_advanced"]

_KEPT_COMMITS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class LastReport:
    report: Report
    ordinal: tuple[int, int]
    """Ordinal of the attempt of the pod that sent it."""

    received_at: float
    pod_uid: str
    """Uid of that pod, from its bearer token."""

    reported_at: Mapping[str, float] = field(default_factory=dict)
    """When each pod of the attempt last reported, by its uid."""

    moved_at: float | None = None
    """When a report of the attempt last showed a higher step than the one before."""

    committed_at: float | None = None
    """When a report of the attempt last named a new commit."""

    commits: tuple[ReportedCommit, ...] = ()
    """The newest commits reported to this operator, oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStatus:
    """Progress that a trainer reports by itself, as transformers' Trainer does to Kubeflow. It proves no step."""

    ordinal: tuple[int, int]
    """Ordinal of the attempt of the pod that sent it."""

    percent: int | None = None
    """The finished share of the training, from 0 to 100."""

    remaining_s: int | None = None
    metrics: Mapping[str, str] = field(default_factory=dict)


class ReportCache:
    """Keep reports and their answers for the operator's lifetime.

    Nothing is stored: pods repeat a report until it is answered, and later ones name HEAD, the job's latest commit.
    """

    def __init__(
        self,
        *,
        report_interval_s: int,
        silence_s: int = 0,
        progress_interval_s: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Take the seconds between two reports of a job, until it is silent, and between two due for mere progress."""
        self._report_interval_s = report_interval_s
        self._silence_s = silence_s
        self._progress_interval_s = progress_interval_s
        self._clock = clock
        self._last: dict[str, LastReport] = {}
        self._trainer_statuses: dict[str, TrainerStatus] = {}
        self._trainer_due_at: dict[str, float] = {}
        self._due_at: dict[str, float] = {}
        """When the last report of a job was due."""

        self._save_requests: dict[str, SaveRequest] = {}
        """The open requests. They may be lost: the next reconcile restores them from the status."""

    def add_report(self, job_uid: str, last: LastReport) -> bool:
        """Keep the report as the job's newest, and add its commits to those of earlier reports.

        Return True if it is due to be shown: if it has news, or progress alone for the first time in its interval.
        """
        known = self._last.get(job_uid)
        # Commits of another root are in another log, with sequences of its own.
        earlier = () if known is None or known.report.root != last.report.root else known.commits
        of_attempt = None if known is None or known.ordinal != last.ordinal else known
        last = _update_liveness(of_attempt, last)
        merged = {commit.sequence: commit for commit in (*earlier, *last.report.commits)}
        if len(merged) > len(earlier):
            last = replace(last, committed_at=last.received_at)
        commits = tuple(merged[sequence] for sequence in sorted(merged)[-_KEPT_COMMITS:])
        self._last[job_uid] = replace(last, commits=commits)
        has_news = of_attempt is None or _has_news(of_attempt, last, silence_s=self._silence_s)
        is_due = has_news or last.received_at - self._due_at[job_uid] >= self._progress_interval_s
        if is_due:
            self._due_at[job_uid] = last.received_at
        return is_due

    def get_report(self, job_uid: str) -> LastReport | None:
        return self._last.get(job_uid)

    def set_trainer_status(self, job_uid: str, status: TrainerStatus) -> bool:
        """Keep the trainer's own progress as the job's newest. It is no report: nothing is judged by it.

        Return True if it is due to be shown: the first of its attempt, or for the first time in its interval.
        """
        known, now = self._trainer_statuses.get(job_uid), self._clock()
        self._trainer_statuses[job_uid] = status
        is_new = known is None or known.ordinal != status.ordinal
        is_due = is_new or now - self._trainer_due_at[job_uid] >= self._progress_interval_s
        if is_due:
            self._trainer_due_at[job_uid] = now
        return is_due

    def get_trainer_status(self, job_uid: str) -> TrainerStatus | None:
        return self._trainer_statuses.get(job_uid)

    def forget_job(self, job_uid: str) -> None:
        self._last.pop(job_uid, None)
        self._trainer_statuses.pop(job_uid, None)
        self._trainer_due_at.pop(job_uid, None)
        self._due_at.pop(job_uid, None)
        self._save_requests.pop(job_uid, None)

    def set_save_request(self, job_uid: str, request: SaveRequest | None) -> None:
        """Set the save request that the job's reports are answered with; None: there is none."""
        if request is None:
            self._save_requests.pop(job_uid, None)
        else:
            self._save_requests[job_uid] = request

    def get_directive(self, job_uid: str) -> Directive:
        """Return the answer to a report of the job, with the time that remains for a requested save."""
        request = self._save_requests.get(job_uid)
        if request is None:
            return Directive(report_interval_s=self._report_interval_s)
        return Directive(
            report_interval_s=self._report_interval_s,
            checkpoint_now=request.id,
            save_reason=request.reason,
            save_within_s=max(0, int(request.maintenance_time - self._clock())),
        )


def has_advanced(step: int | None, before: int | None) -> bool:
    """Return True if `step` is higher than the one before, or the first. A step that goes backwards is no progress."""
    return step is not None and (before is None or step > before)


def _has_news(known: LastReport, last: LastReport, *, silence_s: float) -> bool:
    """Return True if more than the progress of a running training has changed."""
    if last.pod_uid != known.pod_uid or last.received_at - known.received_at >= silence_s:
        return True
    is_back = last.report.step is not None and has_advanced(known.report.step, last.report.step)
    return is_back or _without_progress(known.report) != _without_progress(last.report)


def _without_progress(report: Report) -> Report:
    """Remove the fields that change while the training runs well. Of the step, it is left whether there is one."""
    step = None if report.step is None else 0
    return replace(
        report, tail=0, step=step, step_millis=None, in_flight_step=None, ranks=None, metrics={}, spent=None
    )


def _update_liveness(known: LastReport | None, last: LastReport) -> LastReport:
    """Return `last` with times of earlier reports, steps and commits from `known`, the attempt's previous report."""
    reported_at = {last.pod_uid: last.received_at}
    if known is None:
        return replace(last, reported_at=reported_at)
    moved = has_advanced(last.report.step, known.report.step)
    return replace(
        last,
        reported_at={**known.reported_at, **reported_at},
        moved_at=last.received_at if moved else known.moved_at,
        committed_at=known.committed_at,
    )
