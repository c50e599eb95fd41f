"""Define what the controllers of all kinds share."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from stepkeeper_operator.cache.cache import Cache
from stepkeeper_operator.cluster.protocol import Cluster
from stepkeeper_operator.metrics import Metrics

__all__ = ["Shared"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """The parts of this operator process that every controller uses."""

    cluster: Cluster
    cache: Cache
    metrics: Metrics
    identity: str
    """Name of this operator in events."""

    acting: Callable[[], bool]
    """Returns True while this operator holds the Lease, so that it may write."""

    clock: Callable[[], float] = time.time
    """Returns Unix seconds."""
