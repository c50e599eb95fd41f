"""Account for the time of a job: how much of it made steps that were kept, and what the rest was spent on.

The categories are those of Google's ml-goodput-measurement. The time of an attempt begins at the end of the one before.
What its trainer reports is divided as it says; the rest is infrastructure. Steps after the commit that the next attempt
resumes from are wasted. The status has the sums, so a new operator continues them.
"""

import json
from collections import Counter
from dataclasses import asdict
from typing import Final

from stepkeeper.contract import AttemptKind, TimeSpent
from stepkeeper_operator.api.v1alpha1.trainingjob_status import (
    Attempt,
    CheckpointStatus,
    GoodputStatus,
    OperatorState,
)
from stepkeeper_operator.training_jobs.attempts.attempt_pods import find_current_report
from stepkeeper_operator.training_jobs.attempts.history import JobHistory
from stepkeeper_operator.training_jobs.observed import View

__all__ = ["derive_goodput"]

Seconds = Counter[str]
"""Seconds by category, and `lost_steps`: the fields of GoodputStatus without `_seconds`."""

_PRODUCTIVE: Final = "productive"
_WASTED: Final = "wasted"
_INFRASTRUCTURE: Final = "infrastructure"
_LOST_STEPS: Final = "lost_steps"


def derive_goodput(
    view: View, history: JobHistory, checkpoint: CheckpointStatus | None
) -> tuple[GoodputStatus | None, OperatorState]:
    """Derive the time of the job by category, and the operator's note of the ended attempts."""
    status, noted, last = view.job.status, history.operator, history.last_attempt
    if last is None:
        return status.goodput, noted
    ended = Seconds() if noted.accounted is None else Seconds(json.loads(noted.accounted))
    known = _undo_waste(_read_goodput(status.goodput) - ended)
    shown = status.attempts[-1] if status.attempts else last
    befores = (None, *history.attempts)
    for attempt, before in zip(history.attempts, befores, strict=False):
        if not noted.accounted_attempts < attempt.number < last.number:
            continue
        own = known if attempt.number == shown.number else Seconds()
        part = _divide(own, attempt, before, until=attempt.end)
        ended = ended + _settle(part, attempt, _find_resume_step(last, checkpoint))
        update = {"accounted_attempts": attempt.number, "accounted": json.dumps(ended, sort_keys=True)}
        noted = noted.model_copy(update=update)
    if last.number > noted.accounted_attempts:
        report = find_current_report(view.observed, history)
        own = known if history.is_attempt_of(status) else Seconds()
        if report is not None and report.report.spent is not None:
            own = _read_spent(report.report.spent)
        until = last.end if report is None or last.end is not None else int(report.received_at)
        part = _divide(own, last, befores[-2], until=until)
        ended = ended + _settle(part, last, _find_resume_step(None, checkpoint))
    return _show(ended), noted


def _divide(own: Seconds, attempt: Attempt, before: Attempt | None, *, until: int | None) -> Seconds:
    """Add to what the trainer reported as its `own` time the infrastructure, up to `until`; None: as it is known."""
    if until is None:
        return own
    own = Seconds({name: n for name, n in own.items() if name != _INFRASTRUCTURE})
    if not own.total() and attempt.to_step is not None:
        return own  # its trainer is of a version that doesn't report times
    # A suspended job holds no machines.
    waited = before is not None and before.kind != AttemptKind.SUSPENDED
    since = before.end if before is not None and waited else attempt.start
    own[_INFRASTRUCTURE] = max(0, until - (since or attempt.start) - own.total())
    return own


def _settle(part: Seconds, attempt: Attempt, resume_step: int) -> Seconds:
    """Move the share of the steps of an ended attempt after `resume_step` from productive to wasted."""
    first, last = attempt.from_step or 0, attempt.to_step or 0
    if attempt.end is None or attempt.kind == AttemptKind.COMPLETED or last <= max(first, resume_step):
        return part
    lost = last - max(first, resume_step)
    wasted = part[_PRODUCTIVE] * lost // (last - first)
    return part + Seconds({_WASTED: wasted, _LOST_STEPS: lost}) - Seconds({_PRODUCTIVE: wasted})


def _undo_waste(part: Seconds) -> Seconds:
    own = Seconds({name: n for name, n in part.items() if name not in {_WASTED, _LOST_STEPS}})
    own[_PRODUCTIVE] += part[_WASTED]
    return own


def _find_resume_step(next_attempt: Attempt | None, checkpoint: CheckpointStatus | None) -> int:
    """Find the step that the attempt after an ended one resumes from, as far as it is known."""
    step = 0 if checkpoint is None or checkpoint.latest is None else checkpoint.latest.step
    resumed = None if next_attempt is None else next_attempt.from_step
    return step if resumed is None else min(step, resumed)


def _read_spent(spent: TimeSpent) -> Seconds:
    own = Seconds({name.removesuffix("_millis"): millis // 1000 for name, millis in asdict(spent).items()})
    own[_PRODUCTIVE] = own.pop("train")
    return own


def _read_goodput(status: GoodputStatus | None) -> Seconds:
    if status is None:
        return Seconds()
    raw = status.model_dump(exclude_none=True, exclude={"percent"})
    return Seconds({name.removesuffix("_seconds"): n for name, n in raw.items()})


def _show(seconds: Seconds) -> GoodputStatus | None:
    """Return the status, without categories that have no second."""
    fields = {name if name == _LOST_STEPS else f"{name}_seconds": n for name, n in seconds.items() if n > 0}
    if not fields:
        return None
    total = seconds.total() - seconds[_LOST_STEPS]
    return GoodputStatus(percent=100 * seconds[_PRODUCTIVE] // max(1, total), **fields)
