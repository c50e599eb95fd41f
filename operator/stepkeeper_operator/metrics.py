"""Define the counters and gauges of /metrics."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from typing_extensions import override

__all__ = ["JobMetrics", "JobSample", "Metrics", "QueuedResourceMetrics"]

_OF_JOBS: Final = {
    "job_phase": ("1 for the phase of a job.", ("phase",)),
    "job_condition": ("1 for the status and the reason of a condition.", ("condition", "status", "reason")),
    "job_restarts": ("Restarts of a job over its life, by the cause of the end before.", ("cause",)),
    "job_step_age_seconds": ("Seconds since the last new step of a job that has not ended.", ()),
    "job_commit_age_seconds": ("Seconds since the newest commit of a job that has not ended.", ()),
    "job_save_seconds": ("Duration of the save of the newest commit.", ()),
    "job_recovery_seconds": (
        "Time from the last end of an attempt to the next one's first report of a step.",
        (),
    ),
    "job_goodput_seconds": ("Time of the steps of a job that were kept.", ()),
    "job_badput_seconds": ("Time of a job that made no step that was kept, by category.", ("category",)),
    "job_lost_steps": ("Steps of a job that were made again, or have to be.", ()),
}
"""The gauges of one job: what each shows, and its labels besides namespace and job."""


JobSample: TypeAlias = tuple[str, float, tuple[str, ...]]
"""A gauge of a job without the prefix, its value, its labels. The value of an age is the time that it counts from."""


class JobMetrics(Collector):
    """Show the samples of each job that were recorded last."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._samples: dict[tuple[str, str], tuple[JobSample, ...]] = {}

    def record(self, namespace: str, job: str, samples: Iterable[JobSample]) -> None:
        """Replace all samples of a job."""
        self._samples[namespace, job] = tuple(samples)

    def forget(self, namespace: str, job: str) -> None:
        """Remove a job that no longer exists."""
        self._samples.pop((namespace, job), None)

    @override
    def collect(self) -> Iterator[GaugeMetricFamily]:
        now = self._clock()
        families = {
            name: GaugeMetricFamily(f"stepkeeper_{name}", text, labels=("namespace", "job", *labels))
            for name, (text, labels) in _OF_JOBS.items()
        }
        for place, samples in self._samples.items():
            for name, value, labels in samples:
                shown = max(0.0, now - value) if name.endswith("_age_seconds") else value
                families[name].add_metric((*place, *labels), shown)
        yield from families.values()


class QueuedResourceMetrics:
    """Hold the metrics of QueuedResources and of the requests to the cloud. Those of an object are removed with it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        place = ["project", "zone"]

        def gauge(name: str, text: str, labels: list[str]) -> Gauge:
            return Gauge(f"stepkeeper_{name}", text, labels, registry=registry)

        def of_one(name: str, text: str, *more: str) -> Gauge:
            return gauge(f"queued_resource_{name}", text, ["namespace", "queued_resource", *more])

        self._state = of_one("state", "1 for the state that a QueuedResource is in.", "state")
        text = "Hosts of a QueuedResource's machines; absent while the cloud doesn't report them."
        self._hosts = of_one("hosts", text)
        text = "Hosts of a QueuedResource that are Ready nodes of the cluster and not cordoned."
        self._joined_hosts = of_one("joined_hosts", text)
        self._recreations = of_one("recreations", "Times that a QueuedResource was recreated in the cloud.")
        text = "1 while the project's quota is insufficient for a QueuedResource."
        self._quota_exhausted = of_one("quota_exhausted", text)
        text = "Requests to the Cloud TPU API, by method and by gRPC code."
        self._requests = Counter("stepkeeper_cloud_tpu_requests", text, ["method", "code"], registry=registry)
        text = "Seconds since a project's zone was last listed."
        self._list_age_seconds = gauge("cloud_tpu_list_age_seconds", text, place)
        text = "Cloud resources of this cluster in a project's zone without a QueuedResource."
        self._orphans = gauge("queued_resource_orphans", text, place)
        self._states: dict[tuple[str, str], str] = {}
        self._listed_at: dict[tuple[str, str], float] = {}

    def record(
        self,
        namespace: str,
        name: str,
        *,
        state: str,
        hosts: int | None,
        joined_hosts: int,
        recreations: int,
        quota_exhausted: bool,
    ) -> None:
        """Record the metrics of one object. `hosts` is None while their number is unknown."""
        before = self._states.get((namespace, name))
        # The state is a label: without this, the object would be in both states.
        if before is not None and before != state:
            self._state.remove(namespace, name, before)
        self._states[namespace, name] = state
        self._state.labels(namespace, name, state).set(1)
        if hosts is None:
            self._hosts.remove_by_labels({"namespace": namespace, "queued_resource": name})
        else:
            self._hosts.labels(namespace, name).set(hosts)
        self._joined_hosts.labels(namespace, name).set(joined_hosts)
        self._recreations.labels(namespace, name).set(recreations)
        self._quota_exhausted.labels(namespace, name).set(quota_exhausted)

    def forget(self, namespace: str, name: str) -> None:
        """Remove the metrics of an object that no longer exists."""
        self._states.pop((namespace, name), None)
        for gauge in (self._state, self._hosts, self._joined_hosts, self._recreations, self._quota_exhausted):
            gauge.remove_by_labels({"namespace": namespace, "queued_resource": name})

    def count_request(self, method: str, code: str) -> None:
        """Count a request to the Cloud TPU API."""
        self._requests.labels(method=method, code=code).inc()

    def record_list(self, project: str, zone: str, listed_at: float) -> None:
        """Record when the place was last listed: Unix time."""
        self._listed_at[project, zone] = max(listed_at, self._listed_at.get((project, zone), listed_at))

    def record_orphans(self, project: str, zone: str, count: int) -> None:
        """Record the number of cloud resources of the place without an object."""
        self._orphans.labels(project, zone).set(count)

    def forget_place(self, project: str, zone: str) -> None:
        """Remove the metrics of a place that has no more objects."""
        self._listed_at.pop((project, zone), None)
        for gauge in (self._list_age_seconds, self._orphans):
            gauge.remove_by_labels({"project": project, "zone": zone})

    def update_list_ages(self, now: float) -> None:
        """Set the ages of all lists. Call it before the metrics are read."""
        for (project, zone), listed_at in self._listed_at.items():
            self._list_age_seconds.labels(project, zone).set(now - listed_at)


class Metrics:
    """Hold the operator's metrics in its own registry; nothing is global."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"stepkeeper_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"stepkeeper_{name}", text, labels, registry=registry)

        job = ("namespace", "job")
        self.reports = counter("reports", "Reports from pods, by HTTP status.", "code")
        text = "Reconciles, by the object's kind and by result."
        self.reconciles = counter("reconciles", text, "kind", "result")
        text = "Duration of one reconcile, by the object's kind."
        self.reconcile_seconds = Histogram("stepkeeper_reconcile_seconds", text, ["kind"], registry=registry)
        text = "Writes to the API server, by the kind that they concern and by what was written."
        self.writes = counter("writes", text, "kind", "what")
        self.restarts = counter("restarts", "Ended attempts, by cause.", "cause")
        self.step = gauge("step", "Last step that a job reported.", *job)
        self.committed_step = gauge("committed_step", "Step of the newest commit of a job.", *job)
        text = "Consecutive starts of a job, up to the newest, without a committed checkpoint."
        self.starts_without_checkpoint = gauge("starts_without_checkpoint", text, *job)
        text = (
            "1 while a job's pods run and its condition Progressing is False: no step and no commit for long."
        )
        self.stalled = gauge("stalled", text, *job)
        text = "1 while pods of a job have not started for long: condition Progressing has reason NotStarted."
        self.start_overdue = gauge("start_overdue", text, *job)
        text = (
            "1 while a job's condition PodStuck is True: a pod still exists long after it was asked to end."
        )
        self.pod_stuck = gauge("pod_stuck", text, *job)
        self.queue_length = gauge("queue_length", "Objects that wait for a worker, by kind.", "kind")
        self.watch_age_seconds = gauge("watch_age_seconds", "Seconds since the last event of any watch.")
        text = "1 while this operator does its work: it holds the Lease, and waits for nothing."
        self.acting = gauge("acting", text)
        self.waits_for = gauge("waits_for", "1 for what this operator waits for; absent if it acts.", "what")
        self.jobs = JobMetrics()
        registry.register(self.jobs)
        self.queued_resources = QueuedResourceMetrics(registry)

    def forget_job(self, namespace: str, job: str) -> None:
        """Remove the gauges of a job that no longer exists."""
        self.jobs.forget(namespace, job)
        gauges = (
            self.step,
            self.committed_step,
            self.starts_without_checkpoint,
            self.stalled,
            self.start_overdue,
            self.pod_stuck,
        )
        for gauge in gauges:
            gauge.remove_by_labels({"namespace": namespace, "job": job})

    def render(self) -> bytes:
        """Render all metrics in the exposition format."""
        return generate_latest(self._registry)
