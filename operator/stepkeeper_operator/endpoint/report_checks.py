"""Check a report against the job that it is about. Storage alone decides what is resumed; the status shows reports."""

from dataclasses import replace
from typing import Final

from stepkeeper.contract import Report
from stepkeeper_operator.errors import ReportRefusedError
from stepkeeper_operator.facts.checkpoint_root import is_inside
from stepkeeper_operator.facts.raw import RawObject, get_nested

__all__ = ["check_report", "keep_visible"]

_BEYOND: Final = 1000
"""A step that is greater than `totalSteps` by this factor is an error: `totalSteps` itself may be an old estimate."""

_PLAUSIBLE_STEP: Final = 1_000_000
"""Steps up to this one are taken whatever `totalSteps` is."""


def check_report(report: Report, job: RawObject, *, now: float) -> Report:
    """Return the report without what the job can't have.

    Commits outside its root are left out, with all that is reported of their log: after an edit of the uri, running
    pods still write to the old root. Names and values lose characters that can't be seen.

    Args:
        report: The report as it was sent.
        job: The CheckpointedTrainingJob, of this or another version.
        now: Unix time at which the report was received.

    Raises:
        ReportRefusedError: A step is far beyond the job's last one.

    """
    _check_steps(report, get_nested(job, "spec", "totalSteps"))
    root, head = get_nested(job, "spec", "checkpoint", "uri"), report.head
    uris = [each.uri for each in (*report.commits, *(() if head is None else (head,)))]
    visible = all(text.isprintable() for text in (report.root or "", *uris))
    if not visible or (isinstance(root, str) and not all(is_inside(uri, root) for uri in uris)):
        report = replace(report, root=None, claim=None, tail=0, head=None, commits=())
    return replace(
        report,
        commits=tuple(replace(each, time_unix_s=min(each.time_unix_s, int(now))) for each in report.commits),
        notice=None if report.notice is None else keep_visible(report.notice),
        metrics={keep_visible(name): keep_visible(value) for name, value in report.metrics.items()},
    )


def _check_steps(report: Report, total: object) -> None:
    if not isinstance(total, int):
        return
    points = [
        each for each in (*report.commits, report.head, report.restored, report.ranks) if each is not None
    ]
    steps = [report.step, report.in_flight_step, *(each.step for each in points)]
    far = max((step for step in steps if step is not None), default=0)
    if far > max(_PLAUSIBLE_STEP, _BEYOND * total):
        raise ReportRefusedError(
            400, f"Report: step {far} is far beyond spec.totalSteps ({total}): correct the one that is wrong"
        )


def keep_visible(text: str) -> str:
    """Return the text without characters that can't be seen."""
    return "".join(filter(str.isprintable, text))
