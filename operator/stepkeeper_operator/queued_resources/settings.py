"""Define how often the cloud is asked, and how long things may take."""

from dataclasses import dataclass
from typing import Self

from stepkeeper_operator.settings import OperatorSettings

__all__ = ["CloudSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudSettings:
    """Times of the controller of QueuedResources, in seconds."""

    poll_fast_s: float = 10.0
    """Between two looks while something is happening: an operation, provisioning, a deletion."""

    poll_active_s: float = 60.0
    """Between two looks at an active resource."""

    poll_waiting_s: float = 120.0
    """Between two looks at a request that waits for machines, or at one that nothing more happens to."""

    n_at_once: int = 64
    """Most reconciles at once. A request that hangs costs one of them half a minute; and one connection to the cloud
    takes 100 requests at once."""

    drain_s: float = 600.0
    """Longest wait for the pods on machines that are removed: their jobs save meanwhile."""

    settle_s: float = 90.0
    """Time after which a request to create that got no answer isn't carried out any more: longer than its limit."""

    operation_s: float = 3600.0
    """Longest time for which an operation of the cloud is believed to go on."""

    first_retry_s: float = 5.0
    """Wait after a first passing error. It doubles with each further one."""

    longest_retry_s: float = 300.0
    quota_retry_s: float = 300.0
    """Wait after a first refusal for lack of quota. It doubles with each further one, to half an hour."""

    refused_retry_s: float = 3600.0
    """Wait after an error that stays until somebody changes something: a permission, a project. A deletion doesn't wait
    so long."""

    @classmethod
    def from_settings(cls, settings: OperatorSettings) -> Self:
        """Take over what the operator's settings say."""
        idle_s = settings.cloud_tpu_idle_poll_s
        return cls(
            poll_fast_s=settings.cloud_tpu_poll_s,
            poll_active_s=idle_s,
            poll_waiting_s=2 * idle_s,
            quota_retry_s=settings.cloud_tpu_quota_retry_s,
        )
