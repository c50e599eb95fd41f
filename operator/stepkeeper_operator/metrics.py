"""Define the counters and gauges of /metrics."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

__all__ = ["Metrics", "QueuedResourceMetrics"]


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
        text = "1 while a job's condition Progressing is False: no step and no commit for a long time."
        self.stalled = gauge("stalled", text, *job)
        text = (
            "1 while a job's condition PodStuck is True: a pod still exists long after it was asked to end."
        )
        self.pod_stuck = gauge("pod_stuck", text, *job)
        self.queue_length = gauge("queue_length", "Objects that wait for a worker, by kind.", "kind")
        self.watch_age_seconds = gauge("watch_age_seconds", "Seconds since the last event of any watch.")
        self.acting = gauge("acting", "1 while this operator holds the Lease.")
        self.queued_resources = QueuedResourceMetrics(registry)

    def forget_job(self, namespace: str, job: str) -> None:
        """Remove the gauges of a job that no longer exists."""
        gauges = (
            self.step,
            self.committed_step,
            self.starts_without_checkpoint,
            self.stalled,
            self.pod_stuck,
        )
        for gauge in gauges:
            gauge.remove_by_labels({"namespace": namespace, "job": job})

    def render(self) -> bytes:
        """Render all metrics in the exposition format."""
        return generate_latest(self._registry)
