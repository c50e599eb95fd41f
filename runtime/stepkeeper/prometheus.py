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

    The metrics are `stepkeeper_saves_total{outcome}`, `stepkeeper_saved_bytes_total`, `stepkeeper_committed_step`,
    and histograms of a save's parts in seconds:
    `stepkeeper_save_{stall,transfer,queue,persist,commit,duration}_seconds`. Serving them is the program's
    business, for example with `prometheus_client.start_http_server(port)`.

    Args:
        manager: The manager whose saves are counted.
        registry: The registry to register the metrics in; by default the process's own.

    Returns:
        A function that stops counting and unregisters the metrics, so that another manager's can be exported.

    Raises:
        ImportError: prometheus-client isn't installed.
        ValueError: The registry has these metrics already, of another manager.

    Ranks:
        Any rank, on its own. Each rank exports what it has saved itself.

    """
    try:
        from prometheus_client import REGISTRY, Counter, Gauge, Histogram
    except ImportError as error:
        raise ImportError("metrics need prometheus-client: install stepkeeper[prometheus]") from error

    registry = REGISTRY if registry is None else registry
    # Unregistered at first, so that all of them are registered, or none.
    saves = Counter("stepkeeper_saves", "Saves of this process that have ended.", ["outcome"], registry=None)
    saved_bytes = Counter("stepkeeper_saved_bytes", "What this rank wrote of them.", registry=None)
    step = Gauge("stepkeeper_committed_step", "Step of the newest commit of this process.", registry=None)
    parts = {
        part: Histogram(f"stepkeeper_save_{part}_seconds", text, buckets=_BUCKETS_S, registry=None)
        for part, text in (
            ("stall", "How long the train thread waited for a save."),
            ("transfer", "From the snapshot until all of it was in host memory."),
            ("queue", "Until its turn had come to be written."),
            ("persist", "Until this rank's share was durable."),
            ("commit", "Until the commit was in the log."),
            ("duration", "From the call to the end of a save."),
        )
    }
    with ExitStack() as registered:
        for metric in (saves, saved_bytes, step, *parts.values()):
            registry.register(metric)
            registered.callback(registry.unregister, metric)
        undo = registered.pop_all()

    def count(report: SaveReport) -> None:
        saves.labels("committed" if report.committed else "failed").inc()
        parts["stall"].observe(report.stall_s)
        if not report.committed:
            return
        saved_bytes.inc(report.size_bytes)
        step.set(report.step)
        parts["transfer"].observe(report.transfer_s)
        parts["queue"].observe(report.queue_s)
        parts["persist"].observe(report.persist_s)
        parts["commit"].observe(report.commit_s)
        parts["duration"].observe(report.duration_s)

    undo.callback(manager.on_save(count))
    return undo.close
