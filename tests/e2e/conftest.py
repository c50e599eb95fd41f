"""The cluster that the end-to-end tests share, with the operator as its users install it."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepcluster import lifecycle
from stepcluster.api import Cluster, cluster_up
from stepcluster.product import install_operator
from stepcluster.vms.queued_resources import QueuedResources
from stepcluster.vms.tpu_cloud import chart_values, put_join_secret, tpu_cloud_beside
from tpuapi.remote import RemoteTpu

ROOT = Path(__file__).parents[2]

CLUSTER_VARIABLE = "STEPKEEPER_TEST_CLUSTER"
"""Names a running cluster to use, and to leave running, in place of one that is started for the session."""


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    name = os.environ.get(CLUSTER_VARIABLE)
    if name:
        yield Cluster.attach(name)
        return
    lifecycle.stop_abandoned()
    with cluster_up(f"test-{os.getpid()}") as started:
        yield started


@pytest.fixture(autouse=True)
def all_nodes_on(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that failed with a node off takes no other test with it."""
    yield
    if "cluster" in request.fixturenames:
        started: Cluster = request.getfixturevalue("cluster")
        started.faults.power_on_all()


@pytest.fixture(scope="session")
def operator(cluster: Cluster) -> Cluster:
    """The cluster with the operator, installed by the chart from the wheel of this tree."""
    install_operator(cluster, reportIntervalSeconds=2)
    return cluster


@pytest.fixture(scope="session")
def trainer_image(cluster: Cluster) -> str:
    """Name of the image of examples/text_lm, as its manifest has it, which is on the TPU nodes."""
    return cluster.load_trainer_image(ROOT / "examples" / "text_lm", name="my-registry/text-lm:1")


@pytest.fixture
def object_storage(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Name the cluster's object storage to the trainers of examples/text_lm, and to this process."""
    config = {"STORAGE_EMULATOR_HOST": cluster.gcs_url}
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "object-storage"}, "data": config}
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(body))
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", cluster.gcs_url)


@pytest.fixture(scope="module")
def tpu_cloud(cluster: Cluster) -> Iterator[RemoteTpu]:
    """A Cloud TPU API that the operator asks, whose first two cloud nodes are machines that join the cluster.

    The startup script is in Secret `join-cluster` of namespace default.
    """
    with tpu_cloud_beside(cluster) as remote:
        put_join_secret(cluster)
        install_operator(cluster, more=chart_values(remote), reportIntervalSeconds=2)
        yield remote
        # Nobody could delete their machines later: the service goes.
        cluster.kubectl("delete", "queuedresources", "--all", "--all-namespaces", "--timeout=100s")
        install_operator(cluster, reportIntervalSeconds=2)


@pytest.fixture
def resources(cluster: Cluster, tpu_cloud: RemoteTpu) -> Iterator[QueuedResources]:
    """The cloud as it is at first, with the pair at most."""
    made = QueuedResources(cluster=cluster, cloud=tpu_cloud)
    yield made
    made.clean_up()
