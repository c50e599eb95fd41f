"""The API server takes the manifests of the pages, as they stand."""

import pytest
from page_blocks import ROOT, Block, page_names, read_blocks

from stepcluster.api import Cluster

pytestmark = pytest.mark.cluster

MANIFESTS = [block for page in page_names() for block in read_blocks(page) if block.language == "yaml"]


@pytest.fixture(scope="module")
def kinds(cluster: Cluster) -> Cluster:
    """The cluster with our kinds, and with the namespaces of the manifests."""
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", ROOT / "crds")
    namespace = '{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "ml"}}'
    cluster.kubectl("apply", "-f", "-", stdin=namespace)
    return cluster


@pytest.mark.parametrize("block", MANIFESTS, ids=str)
def test_the_api_server_takes_the_manifest(kinds: Cluster, block: Block) -> None:
    assert "created" in kinds.kubectl("apply", "--dry-run=server", "-f", "-", stdin=block.text)
