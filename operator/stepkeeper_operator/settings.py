"""Read the operator's settings from the environment. Field ``x`` is variable ``STEPKEEPER_OPERATOR_X``."""

import math
from fractions import Fraction
from pathlib import Path
from typing import Final, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

__all__ = ["OperatorSettings"]

_SLOWEST_LOOK: Final = Fraction(6, 5)
"""Share of the time between two looks after which a loss has been seen: a tenth of spread, and the list itself."""


class OperatorSettings(BaseSettings):
    """The settings of one operator process. `__main__` reads them once and passes them down."""

    model_config = SettingsConfigDict(
        env_prefix="STEPKEEPER_OPERATOR_", frozen=True, extra="ignore", use_attribute_docstrings=True
    )

    namespace: str = "stepkeeper-system"
    """Namespace of the operator's own Lease and Secret."""

    identity: str = ""
    """Identity of the Lease's holder. Unset: the pod's name, else the host's."""

    kubeconfig: Path | None = None
    """Kubeconfig of an operator outside of the cluster. Unset: the pod's service account."""

    service_name: str = "stepkeeper-operator"
    """Service in front of the endpoint. Its DNS names are in the certificate."""

    endpoint_url: str | None = None
    """Base URL that pods report to. Unset: the Service's."""

    endpoint_host: str = "0.0.0.0"  # noqa: S104  # a server for pods on all nodes
    endpoint_port: int = 8443
    health_port: int = 8080

    tls_secret_name: str = "stepkeeper-operator-tls"  # noqa: S105  # a name, no secret
    """Secret with the operator's CA and serving certificate."""

    lease_name: str = "stepkeeper-operator"
    lease_duration_s: int = Field(default=15, ge=3)
    """Seconds that a dead operator keeps the next one waiting. The Lease is renewed three times as often."""

    workers: int = Field(default=8, ge=1)
    resync_s: int = Field(default=600, ge=10)
    """Seconds between two looks at a job without any event."""

    report_interval_s: int = Field(default=10, ge=1)
    unreachable_toleration_s: int = Field(default=30, ge=0)
    """Seconds that a pod stays on a node that is not ready or unreachable."""

    reattribution_s: int = Field(default=120, ge=0)
    """Seconds for which better evidence can still change the cause of an ended attempt."""

    lost_node_uptime_s: int = Field(default=60, ge=0)
    """Seconds that the operator has to be up before it fails a pod as lost with its node."""

    progress_interval_s: int = Field(default=60, ge=1)
    """Least seconds between two writes of a job's status that only change its progress."""

    silence_s: int = Field(default=90, ge=10)
    """Seconds without a report after which condition Reporting is False."""

    kueue_enabled: bool = True
    """Watch Kueue's Workloads where the API server knows them."""

    cloud_tpu_enabled: bool = False
    """Watch and reconcile QueuedResources."""

    cloud_tpu_endpoint: str | None = None
    """Address of the Cloud TPU API, host or host:port. Unset: Google's own."""

    cloud_tpu_insecure: bool = False
    """Send plaintext without credentials to `cloud_tpu_endpoint`: to a test's server, never to Google's."""

    cloud_tpu_poll_s: int = Field(default=10, ge=1)
    """Seconds between two looks at a queued resource while something happens to it."""

    cloud_tpu_idle_poll_s: int = Field(default=60, ge=1, le=100)
    """Seconds between two looks at a queued resource that is active; twice as long while it waits for machines.

    Losses have to be seen, with the time of a list, within `reattribution_s`.
    """

    cloud_tpu_quota_retry_s: int = Field(default=300, ge=1)
    """Seconds after a first refusal for lack of quota. The wait doubles with each further one, to half an hour."""

    log_level: str = "INFO"

    @model_validator(mode="after")
    def _name_the_server_of_plaintext(self) -> Self:
        if self.cloud_tpu_insecure and not self.cloud_tpu_endpoint:
            raise ValueError(
                "STEPKEEPER_OPERATOR_CLOUD_TPU_INSECURE is for a test's server only: name it in"
                " STEPKEEPER_OPERATOR_CLOUD_TPU_ENDPOINT (chart: cloudTPU.endpoint), or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _see_losses_in_time(self) -> Self:
        least_s = math.ceil(self.cloud_tpu_idle_poll_s * _SLOWEST_LOOK)
        if self.cloud_tpu_enabled and self.reattribution_s < least_s:
            raise ValueError(
                f"STEPKEEPER_OPERATOR_REATTRIBUTION_S has to be at least {least_s}, {float(_SLOWEST_LOOK)} times"
                " STEPKEEPER_OPERATOR_CLOUD_TPU_IDLE_POLL_S (chart: settings.reattributionSeconds and"
                " cloudTPU.idlePollSeconds): a loss of machines that is seen later explains no failure any more"
            )
        return self

    def certificate_names(self) -> tuple[str, ...]:
        """Return the DNS names and addresses that the endpoint answers to."""
        service = f"{self.service_name}.{self.namespace}"
        names = (f"{service}.svc", f"{service}.svc.cluster.local", service)
        host = None if self.endpoint_url is None else urlsplit(self.endpoint_url).hostname
        return names if host is None or host in names else (*names, host)

    def report_url(self, namespace: str, job: str) -> str:
        """Return the URL that the pods of a job report to."""
        base = self.endpoint_url or f"https://{self.service_name}.{self.namespace}.svc:{self.endpoint_port}"
        return f"{base.rstrip('/')}/v1/namespaces/{namespace}/jobs/{job}/report"
