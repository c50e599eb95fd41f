"""Read the operator's settings from the environment. Field ``x`` is variable ``STEPKEEPER_OPERATOR_X``."""

import math
from fractions import Fraction
from pathlib import Path
from typing import Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from stepkeeper.contract import HangLimits

__all__ = ["OperatorSettings"]

_SLOWEST_POLL: Final = Fraction(6, 5)
"""The longest time until a loss is seen, in poll intervals: one, plus a tenth for jitter and a tenth for the list."""


class OperatorSettings(BaseSettings):
    """The settings of one operator process. `__main__` reads them once and passes them down."""

    model_config = SettingsConfigDict(
        env_prefix="STEPKEEPER_OPERATOR_", frozen=True, extra="ignore", use_attribute_docstrings=True
    )

    namespace: str = "stepkeeper-system"
    """Namespace of the operator's own Lease and Secret."""

    identity: str = ""
    """This operator's identity as holder of the Lease. Unset: the host name, which in a pod is the pod's name."""

    kubeconfig: Path | None = None
    """Kubeconfig for an operator outside of the cluster. Unset: the pod's service account."""

    watch_namespaces: tuple[str, ...] = ()
    """Namespaces that are watched, as a JSON list. Empty: all."""

    service_name: str = "stepkeeper-operator"
    """Service of the endpoint. Its DNS names are in the certificate."""

    endpoint_url: str | None = None
    """Base URL that pods report to. Unset: the Service's."""

    endpoint_host: str = "0.0.0.0"  # noqa: S104  # a server for pods on all nodes
    endpoint_port: int = 8443
    health_port: int = 8080

    tls_secret_name: str = "stepkeeper-operator-tls"  # noqa: S105  # a name, no secret
    """Secret with the operator's CA and serving certificate."""

    lease_name: str = "stepkeeper-operator"
    lease_duration_s: int = Field(default=15, ge=3)
    """Seconds after which another operator can take over from a dead one. The Lease is renewed five times as often."""

    workers: int = Field(default=8, ge=1)
    """Number of jobs that are reconciled at once."""

    resync_s: int = Field(default=600, ge=10)
    """Seconds between two reconciles of a job without events."""

    report_interval_s: int = Field(default=10, ge=1)
    """Seconds between two reports of a running job."""

    unreachable_toleration_s: int = Field(default=30, ge=0)
    """Seconds that a pod stays on a node that is not ready or unreachable."""

    reattribution_s: int = Field(default=120, ge=0)
    """Seconds for which new evidence can still change the cause of an ended attempt."""

    lost_node_uptime_s: int = Field(default=60, ge=0)
    """Seconds that the operator has to be up before it marks a pod as lost with its node."""

    progress_interval_s: int = Field(default=60, ge=1)
    """Minimum seconds between two writes of a job's status that only change its progress."""

    silence_s: int = Field(default=90, ge=10)
    """Seconds without a report after which condition Reporting is False."""

    hang_after_s: int = Field(default=0, ge=0)
    """Seconds without a step after which trainings hang. 0: ten times the longest step so far, and at least 300."""

    hang_startup_s: int = Field(default=HangLimits().startup_s, ge=1)
    """Seconds after which trainings hang that start, restore, or are in another stage between steps."""

    hang_action: Literal["Report", "Restart"] = "Report"
    """What follows the hang of a training. Jobs can set this, and the three others, in spec.hang."""

    hang_max_restarts: int = Field(default=3, ge=0)
    """Restarts of a job after hangs without a new checkpoint between them."""

    kueue_enabled: bool = True
    """Watch Kueue's Workloads if Kueue is installed."""

    cloud_tpu_enabled: bool = False
    """Watch and reconcile QueuedResources."""

    cloud_tpu_endpoint: str | None = None
    """Address of the Cloud TPU API, host or host:port. Unset: Google's own."""

    cloud_tpu_insecure: bool = False
    """Send plaintext without credentials to `cloud_tpu_endpoint`: only for a test server."""

    cloud_tpu_poll_s: int = Field(default=10, ge=1)
    """Seconds between two polls of a queued resource that is changing."""

    cloud_tpu_idle_poll_s: int = Field(default=60, ge=1, le=100)
    """Seconds between two polls of an active queued resource; twice as long while it waits for machines.

    A loss has to be seen within `reattribution_s`, including the time of a list: 100 is the most that the default of
    `reattribution_s` allows.
    """

    cloud_tpu_quota_retry_s: int = Field(default=300, ge=1)
    """Seconds until the retry after a first refusal for lack of quota. It doubles each time, up to half an hour."""

    log_level: str = "INFO"

    @model_validator(mode="after")
    def _check_insecure_endpoint(self) -> Self:
        if self.cloud_tpu_insecure and not self.cloud_tpu_endpoint:
            raise ValueError(
                "STEPKEEPER_OPERATOR_CLOUD_TPU_INSECURE is only for a test server: set its address in"
                " STEPKEEPER_OPERATOR_CLOUD_TPU_ENDPOINT (chart: cloudTPU.endpoint), or unset the variable"
            )
        return self

    @model_validator(mode="after")
    def _check_silence(self) -> Self:
        if self.silence_s <= self.report_interval_s:
            raise ValueError(
                f"STEPKEEPER_OPERATOR_SILENCE_S ({self.silence_s}) has to be greater than"
                f" STEPKEEPER_OPERATOR_REPORT_INTERVAL_S ({self.report_interval_s}) (chart: settings.silenceSeconds and"
                " settings.reportIntervalSeconds): each pod would be silent between two reports"
            )
        return self

    @model_validator(mode="after")
    def _check_poll_interval(self) -> Self:
        least_s = math.ceil(self.cloud_tpu_idle_poll_s * _SLOWEST_POLL)
        if self.cloud_tpu_enabled and self.reattribution_s < least_s:
            raise ValueError(
                f"STEPKEEPER_OPERATOR_REATTRIBUTION_S has to be at least {least_s}, {float(_SLOWEST_POLL)} times"
                " STEPKEEPER_OPERATOR_CLOUD_TPU_IDLE_POLL_S (chart: settings.reattributionSeconds and"
                " cloudTPU.idlePollSeconds): a loss of machines that is seen later can't explain a failure"
            )
        return self

    def certificate_names(self) -> tuple[str, ...]:
        """Return the DNS names and addresses of the endpoint."""
        service = f"{self.service_name}.{self.namespace}"
        names = (f"{service}.svc", f"{service}.svc.cluster.local", service)
        host = None if self.endpoint_url is None else urlsplit(self.endpoint_url).hostname
        return names if host is None or host in names else (*names, host)

    def report_url(self, namespace: str, job: str) -> str:
        """Return the URL that the pods of a job report to."""
        return f"{self._job_url(namespace, job)}/report"

    def trainer_status_url(self, namespace: str, job: str) -> str:
        """Return the URL that a job's trainer may send its own progress to, as to Kubeflow."""
        return f"{self._job_url(namespace, job)}/trainer-status"

    def _job_url(self, namespace: str, job: str) -> str:
        base = self.endpoint_url or f"https://{self.service_name}.{self.namespace}.svc:{self.endpoint_port}"
        return f"{base.rstrip('/')}/v1/namespaces/{namespace}/jobs/{job}"
