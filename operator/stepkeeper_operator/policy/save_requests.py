"""Ask a running training to save ahead of announced maintenance, and see the commit that answers."""

from typing import Final

from stepkeeper_operator.api.v1alpha1.trainingjob_status import CheckpointStatus, SaveRequest
from stepkeeper_operator.facts.raw import render_time
from stepkeeper_operator.observed import Observed
from stepkeeper_operator.policy.history import JobHistory

__all__ = ["compute_lead_s", "find_open_request", "update_request"]

_MIN_LEAD_S: Final = 120.0
_MAX_LEAD_S: Final = 3600.0
_LEAD_PER_SAVE: Final = 3.0
"""Times that the last save took, before maintenance: one for a save in flight, one for ours, one for luck."""


def update_request(
    observed: Observed,
    checkpoint: CheckpointStatus | None,
    history: JobHistory,
    *,
    now: float,
) -> tuple[CheckpointStatus | None, float | None]:
    """Add a request that is due to the checkpoint part of the status, and the commit that answers the last one.

    Returns:
        That part, and the seconds until a request will be due; None if none is known.

    """
    status = _add_answer(checkpoint or CheckpointStatus())
    machines = observed.machines
    if not history.is_running or machines is None or machines.maintenance_at is None:
        return _none_if_empty(status), None
    request_id = f"maintenance-{int(machines.maintenance_at)}"
    if status.last_request is not None and status.last_request.id == request_id:
        return _none_if_empty(status), None
    wait_s = machines.maintenance_at - compute_lead_s(status) - now
    if wait_s > 0:
        return _none_if_empty(status), wait_s
    left_s = max(0, int(machines.maintenance_at - now))
    begin = render_time(machines.maintenance_at)
    reason = f"QueuedResource {machines.name} has maintenance from {begin}, in {left_s} s"
    known = None if status.latest is None else status.latest.sequence
    request = SaveRequest(id=request_id, time=int(now), reason=reason, after=known)
    return status.model_copy(update={"last_request": request}), None


def compute_lead_s(status: CheckpointStatus) -> float:
    """Compute how many seconds before maintenance a save is asked for, from the time that the last one took."""
    millis = None if status.latest is None else status.latest.duration_millis
    return min(_MAX_LEAD_S, max(_MIN_LEAD_S, _LEAD_PER_SAVE * (millis or 0) / 1000))


def find_open_request(checkpoint: CheckpointStatus | None, history: JobHistory) -> str | None:
    """Return the id of the request that no commit has answered yet. An attempt that has ended answers none."""
    request = None if checkpoint is None else checkpoint.last_request
    last = history.last_attempt
    if request is None or request.sequence is not None or last is None or not history.is_running:
        return None
    return request.id if request.time >= last.start else None


def _add_answer(status: CheckpointStatus) -> CheckpointStatus:
    request, latest = status.last_request, status.latest
    if request is None or request.sequence is not None or latest is None:
        return status
    if request.after is not None and latest.sequence <= request.after:
        return status
    answered = request.model_copy(update={"sequence": latest.sequence, "step": latest.step})
    return status.model_copy(update={"last_request": answered})


def _none_if_empty(status: CheckpointStatus) -> CheckpointStatus | None:
    return None if status == CheckpointStatus() else status
