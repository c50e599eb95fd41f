"""List the kinds that the operator watches, and how."""

from dataclasses import dataclass
from typing import Final

from stepkeeper_operator.cluster.resources import (
    BATCH_JOBS,
    JOBSETS,
    NODES,
    PODS,
    QUEUED_RESOURCES,
    TRAINING_JOBS,
    WORKLOADS,
    Resource,
)
from stepkeeper_operator.labels import JOB_UID_LABEL

__all__ = ["WatchedKind", "list_watched_kinds"]

_BURST_S: Final = 0.25
"""Pods, Jobs and JobSets change together, but their watch events don't arrive together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedKind:
    """A kind whose objects the watches feed into the cache."""

    resource: Resource
    label_selector: str = ""
    """Selects the objects that are watched. Empty: all."""

    reconciled: bool = False
    """True for a kind whose objects are reconciled themselves."""

    custom: bool = False
    """True for a kind that the API server knows only once its CRD is installed."""

    removable: bool = False
    """True for an optional kind: if the API server no longer knows it, its objects are gone."""

    delay_s: float = 0.0
    """Seconds from a change to the reconcile of the objects that it concerns."""


_JOB_KINDS: Final = (
    WatchedKind(resource=TRAINING_JOBS, reconciled=True, custom=True),
    WatchedKind(resource=JOBSETS, label_selector=JOB_UID_LABEL, custom=True, delay_s=_BURST_S),
    WatchedKind(resource=BATCH_JOBS, label_selector=JOB_UID_LABEL, delay_s=_BURST_S),
    WatchedKind(resource=PODS, label_selector=JOB_UID_LABEL, delay_s=_BURST_S),
    WatchedKind(resource=NODES, delay_s=_BURST_S),
)
_QUEUED_RESOURCES: Final = WatchedKind(resource=QUEUED_RESOURCES, reconciled=True, custom=True)
_WORKLOADS: Final = WatchedKind(resource=WORKLOADS, removable=True, delay_s=_BURST_S)


def list_watched_kinds(*, cloud_tpu: bool, kueue: bool = False) -> tuple[WatchedKind, ...]:
    """List the kinds to watch, to wait for and to sweep.

    QueuedResources are there only with `cloud_tpu`, Workloads only with `kueue`: where Kueue is installed.
    """
    kinds = (*_JOB_KINDS, _QUEUED_RESOURCES) if cloud_tpu else _JOB_KINDS
    return (*kinds, _WORKLOADS) if kueue else kinds
