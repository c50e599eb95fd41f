"""The cluster that the demo plays on, and the cloud beside it."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from demo.furnishing import furnish, say
from stepcluster.api import Cluster, cluster_up
from stepcluster.vms.tpu_cloud import TIMINGS, chart_values, put_join_secret, tpu_cloud_beside
from tpuapi.remote import RemoteTpu

__all__ = ["Stage", "open_stage"]

_PROVISIONING_S = 8.0
"""Long enough for the state to be seen; a cloud takes minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    cluster: Cluster
    cloud: RemoteTpu


@contextlib.contextmanager
def open_stage() -> Iterator[Stage]:
    """Start a cluster without any TPU, with the operator installed, and a Cloud TPU API whose machines can join it.

    Both are taken down afterwards.
    """
    began_s = time.monotonic()
    say("starting a cluster: API server, a system node, object storage; nothing in it has TPU chips")
    timings = {**TIMINGS, "provisioning_s": _PROVISIONING_S}
    with cluster_up("demo-tpu", n_tpu_nodes=0) as cluster:
        say(f"cluster ready after {time.monotonic() - began_s:.0f} s")
        with tpu_cloud_beside(cluster, timings=timings) as cloud:
            say("beside it a Cloud TPU API to test against; its machines join by their own startup script")
            put_join_secret(cluster)
            furnish(cluster, chart_values=chart_values(cloud))
            yield Stage(cluster=cluster, cloud=cloud)
