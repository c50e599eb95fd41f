"""Hold the counters and gauges that /metrics shows."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

__all__ = ["Metrics"]


class Metrics:
    """Hold the operator's metrics in a registry of their own; nothing is global."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.reports = Counter(
            "stepkeeper_reports", "Reports from pods, by HTTP status.", ["code"], registry=self._registry
        )
        self.reconciles = Counter(
            "stepkeeper_reconciles",
            "Reconciles, by the object's kind and by result.",
            ["kind", "result"],
            registry=self._registry,
        )
        self.reconcile_seconds = Histogram(
            "stepkeeper_reconcile_seconds",
            "Duration of one reconcile, by the object's kind.",
            ["kind"],
            registry=self._registry,
        )
        self.writes = Counter(
            "stepkeeper_writes",
            "Writes to the API server, by the kind that they were for and by what was written.",
            ["kind", "what"],
            registry=self._registry,
        )
        self.restarts = Counter(
            "stepkeeper_restarts", "Ended attempts, by cause.", ["cause"], registry=self._registry
        )
        self.step = Gauge(
            "stepkeeper_step", "Last step that a job reported.", ["namespace", "job"], registry=self._registry
        )
        self.committed_step = Gauge(
            "stepkeeper_committed_step",
            "Step of the newest commit of a job.",
            ["namespace", "job"],
            registry=self._registry,
        )
        self.queue_length = Gauge(
            "stepkeeper_queue_length",
            "Objects that wait for a worker, by kind.",
            ["kind"],
            registry=self._registry,
        )
        self.watch_age_seconds = Gauge(
            "stepkeeper_watch_age_seconds",
            "Seconds since the last event of any watch.",
            registry=self._registry,
        )
        self.acting = Gauge(
            "stepkeeper_acting", "1 while this operator holds the Lease.", registry=self._registry
        )

    def forget_job(self, namespace: str, job: str) -> None:
        """Remove the gauges of a job that is gone."""
        for gauge in (self.step, self.committed_step):
            gauge.remove_by_labels({"namespace": namespace, "job": job})

    def render(self) -> bytes:
        """Render all metrics in the exposition format."""
        return generate_latest(self._registry)
