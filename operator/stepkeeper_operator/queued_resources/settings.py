"""Define poll intervals, retry waits and time limits for the cloud. Pure."""

from dataclasses import dataclass
from typing import Final, Self

from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceState, QueuedResourceStatus
from stepkeeper_operator.cloud_tpu.cloud import ErrorKind
from stepkeeper_operator.settings import OperatorSettings

__all__ = ["CloudSettings"]

_QUOTA_LIMIT_S: Final = 1800.0
_MAX_DOUBLINGS: Final = 20
_WAITING: Final = {
    QueuedResourceState.ACCEPTED,
    QueuedResourceState.WAITING,
    QueuedResourceState.FAILED,
    QueuedResourceState.SUSPENDED,
    QueuedResourceState.GONE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudSettings:
    """Settings of the controller of QueuedResources. Times are in seconds."""

    watched: tuple[str, ...] = ()
    """Namespaces whose objects are known. Empty: all."""

    poll_fast_s: float = 10.0
    """Poll interval while the resource is changing: an operation, provisioning, a deletion."""

    poll_active_s: float = 60.0
    """Poll interval of an active resource."""

    poll_waiting_s: float = 120.0
    """Poll interval of a request that waits for machines, or that has ended."""

    n_workers: int = 64
    """Maximum number of concurrent reconciles. A request that hangs blocks one of them for half a minute. One
    connection to the cloud takes 100 concurrent requests."""

    drain_s: float = 600.0
    """Longest wait for the pods on machines that are removed, in which their jobs save."""

    settle_s: float = 90.0
    """Time after which an unanswered request to create is no longer carried out: longer than its time limit."""

    operation_s: float = 3600.0
    """Time after which an operation of the cloud is no longer expected to finish."""

    first_retry_s: float = 5.0
    """Wait after a first transient error. It doubles each time."""

    longest_retry_s: float = 300.0
    quota_retry_s: float = 300.0
    """Wait after a first refusal for lack of quota. It doubles each time, up to half an hour."""

    refused_retry_s: float = 3600.0
    """Wait after an error that needs a person: a permission, a project. Deletions wait less."""

    @classmethod
    def from_settings(cls, settings: OperatorSettings) -> Self:
        """Take the times from the operator's settings."""
        idle_s = settings.cloud_tpu_idle_poll_s
        return cls(
            watched=settings.watch_namespaces,
            poll_fast_s=settings.cloud_tpu_poll_s,
            poll_active_s=idle_s,
            poll_waiting_s=2 * idle_s,
            quota_retry_s=settings.cloud_tpu_quota_retry_s,
        )

    def compute_poll_s(self, status: QueuedResourceStatus) -> float:
        """Compute the seconds until the next poll of the cloud, by how soon a change is expected."""
        if status.operation is not None or status.removing:
            return self.poll_fast_s
        if status.state in _WAITING:
            return self.poll_waiting_s
        # The retry after an error has a time of its own.
        idle = status.state is QueuedResourceState.ACTIVE or status.error is not None
        return self.poll_active_s if idle else self.poll_fast_s

    def compute_retry_s(self, kind: ErrorKind, n_errors: int) -> float:
        """Compute the wait after the `n_errors`th consecutive error."""
        factor = 2.0 ** min(max(0, n_errors - 1), _MAX_DOUBLINGS)
        match kind:
            case ErrorKind.QUOTA:
                return min(max(_QUOTA_LIMIT_S, self.quota_retry_s), self.quota_retry_s * factor)
            case ErrorKind.TERMINAL | ErrorKind.NOT_FOUND:
                return self.refused_retry_s
            case ErrorKind.CREDENTIALS:
                return self.longest_retry_s
            case ErrorKind.BUSY | ErrorKind.ALREADY_EXISTS | ErrorKind.TRANSIENT:
                return min(self.longest_retry_s, self.first_retry_s * factor)
