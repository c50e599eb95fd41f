"""Export Prometheus metrics of this process's saves. Needs the extra `stepkeeper[prometheus]`."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from stepkeeper.manager import CheckpointManager
from stepkeeper.save.report import SaveReport

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["export"]

_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)


def export(manager: CheckpointManager, registry: "CollectorRegistry | None" = None) -> Callable[[], None]:
    """Count every save of `manager` in a Prometheus registry.

    The metrics are `stepkeeper_saves_total{outcome}`, `stepkeeper_saved_bytes_total`, `stepkeeper_committed_step`, and
    histograms of a save's parts in seconds: `stepkeeper_save_{stall,transfer,queue,persist,commit,duration}_seconds`.
    The program has to serve them, for example with `prometheus_client.start_http_server(port)`.

    Args:
        manager: The manager whose saves are counted.
        registry: The registry to register the metrics in; by default the process's own.

    Returns:
        A function that stops counting and unregisters the metrics, so that another manager's can be exported.

    Raises:
        ImportError: prometheus-client isn't installed.
        ValueError: The registry already has these metrics of another manager.

    Ranks:
        Any rank, on its own. Each rank exports its own saves.
    """
    try:
        from prometheus_client import REGISTRY
    except ImportError as error:
        raise ImportError("prometheus-client is missing: install stepkeeper[prometheus]") from error

    registry = REGISTRY if registry is None else registry
    metrics = _SaveMetrics()
    # If the registry refuses one metric, those before it are unregistered again.
    with ExitStack() as registered:
        for metric in metrics.all:
            registry.register(metric)
            registered.callback(registry.unregister, metric)
        undo = registered.pop_all()
    undo.callback(manager.on_save(metrics.count_save))
    return undo.close


class _SaveMetrics:
    """The metrics of saves, created unregistered, so that all or none of them can be registered."""

    def __init__(self) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        self._saves = Counter(
            "stepkeeper_saves", "Saves of this process that have ended.", ["outcome"], registry=None
        )
        self._saved_bytes = Counter(
            "stepkeeper_saved_bytes", "Bytes that this rank wrote for saves.", registry=None
        )
        self._step = Gauge(
            "stepkeeper_committed_step", "Step of the newest commit of this process.", registry=None
        )
        self._parts = {
            part: Histogram(f"stepkeeper_save_{part}_seconds", text, buckets=_BUCKETS_S, registry=None)
            for part, text in (
                ("stall", "Time that the train thread waited for a save."),
                ("transfer", "Time from the snapshot until all of it was in host memory."),
                ("queue", "Time in the queue before the write."),
                ("persist", "Time until this rank's share was durable."),
                ("commit", "Time until the commit was in the log."),
                ("duration", "Time from the call to the end of a save."),
            )
        }
        self.all = (self._saves, self._saved_bytes, self._step, *self._parts.values())

    def count_save(self, report: SaveReport) -> None:
        """Count a save that has ended."""
        self._saves.labels("committed" if report.committed else "failed").inc()
        self._parts["stall"].observe(report.stall_s)
        if not report.committed:
            return
        self._saved_bytes.inc(report.size_bytes)
        self._step.set(report.step)
        self._parts["transfer"].observe(report.transfer_s)
        self._parts["queue"].observe(report.queue_s)
        self._parts["persist"].observe(report.persist_s)
        self._parts["commit"].observe(report.commit_s)
        self._parts["duration"].observe(report.duration_s)
