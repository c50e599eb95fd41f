"""The cluster that the demo plays on."""

import contextlib
import time
from collections.abc import Iterator

from demo.furnishing import furnish, say
from stepcluster.api import Cluster, cluster_up

__all__ = ["open_stage"]

_NAME = "demo"


@contextlib.contextmanager
def open_stage(*, image: str, keep: bool) -> Iterator[Cluster]:
    """Start a cluster with the operator and an image of the trainer under this name, and take it down afterwards.

    With `keep` it keeps running, and a message shows how to use it and how to end it.
    """
    began_s = time.monotonic()
    say("starting a cluster: API server, a system node, two nodes with four TPU chips each, object storage")
    with cluster_up(_NAME, keep=keep) as cluster:
        say(f"cluster ready after {time.monotonic() - began_s:.0f} s")
        say("a node is given up after 20 s of silence here and its pods 5 s later; elsewhere that is minutes")
        furnish(cluster, image=image)
        yield cluster
    if keep:
        say(f'the cluster keeps running: eval "$(.venv/bin/python -m stepcluster env --name {_NAME})"')
        say(f"to end it: make cluster-down NAME={_NAME}")
