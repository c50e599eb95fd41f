"""The cluster that the end-to-end tests share."""

import os
from collections.abc import Iterator

import pytest

from stepcluster.api import Cluster, cluster_up

CLUSTER_VARIABLE = "STEPKEEPER_TEST_CLUSTER"
"""Names a running cluster to use, and to leave running, in place of one that is started for the session."""


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    name = os.environ.get(CLUSTER_VARIABLE)
    if name:
        yield Cluster.attach(name)
        return
    with cluster_up(f"test-{os.getpid()}") as started:
        yield started
