"""The newest report of every job, and the commits that the status doesn't show yet."""

from dataclasses import dataclass, replace

from stepkeeper.contract import Report, ReportedCommit

__all__ = ["LastReport", "ReportBook"]

_KEPT_COMMITS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class LastReport:
    report: Report
    ordinal: tuple[int, int]
    """Of the attempt that the token's pod belongs to."""

    pod: str
    received_at: float
    commits: tuple[ReportedCommit, ...] = ()
    """The newest commits that were reported to this operator, oldest first."""


class ReportBook:
    """Lives as long as the operator: a report is repeated until it is answered, and the next one says the head."""

    def __init__(self) -> None:
        self._last: dict[str, LastReport] = {}

    def add(self, job_uid: str, last: LastReport) -> None:
        """The report is the job's newest; its commits are added to those that earlier ones named."""
        known = self._last.get(job_uid)
        earlier = () if known is None or known.report.root != last.report.root else known.commits
        merged = {commit.sequence: commit for commit in (*earlier, *last.report.commits)}
        commits = tuple(merged[sequence] for sequence in sorted(merged)[-_KEPT_COMMITS:])
        self._last[job_uid] = replace(last, commits=commits)

    def of(self, job_uid: str) -> LastReport | None:
        return self._last.get(job_uid)

    def forget(self, job_uid: str) -> None:
        self._last.pop(job_uid, None)
