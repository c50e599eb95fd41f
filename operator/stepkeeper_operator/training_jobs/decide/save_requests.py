"""Request a save from a running training before announced maintenance, and find the commit that fulfills it."""

from typing import Final

from stepkeeper_operator.api.v1alpha1.trainingjob_status import (
    Attempt,
    CheckpointStatus,
    SaveRequest,
    TrainingJobStatus,
)
from stepkeeper_operator.facts.queued_resource import MaintenanceWindow
from stepkeeper_operator.facts.raw import render_time
from stepkeeper_operator.training_jobs.attempts.history import JobHistory
from stepkeeper_operator.training_jobs.observed import View

__all__ = ["compute_lead_s", "find_open_request", "update_request"]

_MIN_LEAD_S: Final = 120.0
_MAX_LEAD_S: Final = 3600.0
_LEAD_PER_SAVE: Final = 3.0
"""The lead time, in durations of the last save: one for a save in flight, one for the requested save, one to spare."""

_TOGETHER_S: Final = _MIN_LEAD_S
"""Windows that begin within this number of seconds of each other share one request."""


def update_request(
    view: View, checkpoint: CheckpointStatus | None, history: JobHistory
) -> tuple[CheckpointStatus | None, float | None]:
    """Add a due request to the checkpoint part of the status, and the commit that fulfills the last one.

    Each attempt gets one request per window, as soon as it has a step that is not committed. Return also the seconds
    until a request is due, if one is known.
    """
    status, attempt = _add_answer(checkpoint or CheckpointStatus()), history.last_attempt
    unchanged = None if status == CheckpointStatus() else status
    window = None if attempt is None else _find_window(view, status, attempt)
    if not history.is_running or attempt is None or window is None or view.machines is None:
        return unchanged, None
    wait_s = window.begins_at - compute_lead_s(status) - view.now
    if wait_s > 0:
        return unchanged, wait_s
    if attempt.to_step is None or (status.latest is not None and attempt.to_step <= status.latest.step):
        return unchanged, None  # the attempt has made no step that is not committed
    request = _make_request(view.machines.name, window, attempt, status, now=view.now)
    return status.model_copy(update={"last_request": request}), None


def compute_lead_s(status: CheckpointStatus) -> float:
    """Compute how many seconds before maintenance to request a save, from the duration of the last one."""
    millis = None if status.latest is None else status.latest.duration_millis
    return min(_MAX_LEAD_S, max(_MIN_LEAD_S, _LEAD_PER_SAVE * (millis or 0) / 1000))


def find_open_request(status: TrainingJobStatus) -> SaveRequest | None:
    """Return the request that no commit has fulfilled yet; None once its attempt has ended."""
    request = None if status.checkpoint is None else status.checkpoint.last_request
    last = status.attempts[-1] if status.attempts else None
    if request is None or request.sequence is not None or last is None or last.end is not None:
        return None
    return request if request.attempt == last.number else None


def _find_window(view: View, status: CheckpointStatus, attempt: Attempt) -> MaintenanceWindow | None:
    """Find the earliest window that is not over and for which the attempt has no request."""
    request, covered_until = status.last_request, float("-inf")
    if request is not None and request.attempt == attempt.number:
        covered_until = request.maintenance_time + _TOGETHER_S
    for window in () if view.machines is None else view.machines.windows:
        over = window.ends_at is not None and window.ends_at <= view.now
        if not over and window.begins_at > covered_until:
            return window
    return None


def _make_request(
    resource: str, window: MaintenanceWindow, attempt: Attempt, status: CheckpointStatus, *, now: float
) -> SaveRequest:
    left_s = int(window.begins_at - now)
    when = f"in {left_s} s" if left_s > 0 else "which may begin at any moment"
    return SaveRequest(
        id=f"maintenance-{int(window.begins_at)}-{attempt.number}",
        attempt=attempt.number,
        maintenance_time=int(window.begins_at),
        time=int(now),
        reason=f"QueuedResource {resource} has maintenance from {render_time(window.begins_at)}, {when}",
        latest_sequence=None if status.latest is None else status.latest.sequence,
    )


def _add_answer(status: CheckpointStatus) -> CheckpointStatus:
    """Add to the open request the first commit that is newer than the request."""
    request, latest = status.last_request, status.latest
    if request is None or request.sequence is not None or latest is None:
        return status
    if request.latest_sequence is not None and latest.sequence <= request.latest_sequence:
        return status
    answered = request.model_copy(update={"sequence": latest.sequence, "step": latest.step})
    return status.model_copy(update={"last_request": answered})
