"""Say how long to wait: between two looks at the cloud, before the next try, before the next recreation. Pure."""

from typing import Final

from stepkeeper_operator.api.v1alpha1.queuedresource import RecreateBackoff
from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceState, QueuedResourceStatus
from stepkeeper_operator.cloud_tpu.cloud import ErrorKind
from stepkeeper_operator.queued_resources.observed import Refusal
from stepkeeper_operator.queued_resources.settings import CloudSettings

__all__ = [
    "compute_backoff_s",
    "compute_poll_s",
    "compute_rest_s",
    "compute_retry_s",
]

_QUOTA_LIMIT_S: Final = 1800.0
_MOST_DOUBLINGS: Final = 20

_SLOW: Final = {QueuedResourceState.ACCEPTED, QueuedResourceState.WAITING}
_RESTING: Final = {QueuedResourceState.FAILED, QueuedResourceState.SUSPENDED, QueuedResourceState.GONE}


def compute_poll_s(status: QueuedResourceStatus, settings: CloudSettings) -> float:
    """Compute the seconds until the cloud is looked at again: the sooner, the sooner something can have changed."""
    if status.operation is not None or status.bookkeeping.removing:
        return settings.poll_fast_s
    if status.state is QueuedResourceState.ACTIVE:
        return settings.poll_active_s
    if status.state in _SLOW or status.state in _RESTING:
        return settings.poll_waiting_s
    if status.error is not None:
        return settings.poll_active_s
    return settings.poll_fast_s


def compute_retry_s(kind: ErrorKind, retries: int, settings: CloudSettings) -> float:
    """Compute the wait after the `retries`th error in a row."""
    doublings = min(max(0, retries - 1), _MOST_DOUBLINGS)
    match kind:
        case ErrorKind.QUOTA:
            return float(
                min(max(_QUOTA_LIMIT_S, settings.quota_retry_s), settings.quota_retry_s * 2**doublings)
            )
        case ErrorKind.TERMINAL | ErrorKind.NOT_FOUND:
            return settings.refused_retry_s
        case ErrorKind.CREDENTIALS:
            return settings.longest_retry_s
        case ErrorKind.BUSY | ErrorKind.ALREADY_EXISTS | ErrorKind.TRANSIENT:
            return float(min(settings.longest_retry_s, settings.first_retry_s * 2**doublings))


def compute_rest_s(refusal: Refusal | None, settings: CloudSettings, *, now: float) -> float:
    """Compute the seconds until a node's change or deletion may be asked for again; 0: it may be now."""
    if refusal is None:
        return 0.0
    wait_s = compute_retry_s(ErrorKind.TRANSIENT, refusal.count, settings)
    return max(0.0, refusal.at + wait_s - now)


def compute_backoff_s(backoff: RecreateBackoff, streak: int) -> float:
    """Compute the wait before a recreation, after `streak` recreations in a row."""
    return float(min(backoff.max_seconds, backoff.initial_seconds * 2 ** min(streak, _MOST_DOUBLINGS)))
