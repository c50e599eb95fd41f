"""Pages for somebody with a cluster: the API server takes their manifests, and their commands do what they say."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import yaml
from page_blocks import ROOT, Block, page_names, read_blocks
from page_reader import Reader, reading

from stepcluster.api import Cluster
from stepcluster.overlay import for_test_cluster
from stepcluster.product import NAMESPACE, install_operator
from stepcluster.vms.queued_resources import V5E, ClusterObject, QueuedResources
from stepcluster.vms.tpu_cloud import chart_values, put_join_secret, tpu_cloud_beside

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(1200)]

MANIFESTS: Final = [block for page in page_names() for block in read_blocks(page) if block.language == "yaml"]
LOOKS_FOR_S: Final = 240
"""Far more than the operator needs."""

_NUMBER: Final = "123456789012"
_PROVIDER: Final = f"projects/{_NUMBER}/locations/global/workloadIdentityPools/clusters/providers/my-cluster"
FEDERATED: Final = {
    "type": "external_account",
    "audience": f"//iam.googleapis.com/{_PROVIDER}",
    "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
    "token_url": "https://sts.googleapis.com/v1/token",
    "credential_source": {"file": "/var/run/secrets/cloud-tpu-token/token"},
}
"""What gcloud writes into credentials.json."""


@pytest.fixture(scope="module")
def kinds(cluster: Cluster) -> Cluster:
    """The cluster with our kinds, and with the namespaces of the manifests."""
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", ROOT / "charts/stepkeeper/crds")
    namespace = '{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "ml"}}'
    cluster.kubectl("apply", "-f", "-", stdin=namespace)
    return cluster


@pytest.mark.parametrize("block", MANIFESTS, ids=str)
def test_the_api_server_takes_the_manifest(kinds: Cluster, block: Block) -> None:
    assert "created" in kinds.kubectl("apply", "--dry-run=server", "-f", "-", stdin=block.text)


@pytest.fixture(scope="module")
def before_us(kinds: Cluster) -> Iterator[Cluster]:
    """The cluster, and the operator's image on its nodes. Afterwards it has the operator as other tests know it."""
    kinds.load_operator_image()
    yield kinds
    install_operator(kinds, reportIntervalSeconds=2)


@pytest.fixture
def no_operator(before_us: Cluster) -> Cluster:
    uninstall(before_us)
    return before_us


@pytest.fixture(scope="module")
def cloud(before_us: Cluster) -> Iterator[QueuedResources]:
    """A Cloud TPU API without machines to give, which an operator asks that may read Secret ml/join-cluster."""
    with tpu_cloud_beside(before_us, n_nodes=0) as remote:
        resources = QueuedResources(cluster=before_us, cloud=remote)
        resources.set_capacity(V5E, 0)
        put_join_secret(before_us, namespace="ml")
        install_operator(before_us, more=chart_values(remote, namespace="ml"))
        yield resources
        # Nobody could delete them in the cloud later: the service goes.
        before_us.kubectl("delete", "qr", "--all", "--all-namespaces", "--timeout=100s", timeout_s=110)
        uninstall(before_us)


@pytest.fixture
def reader(cluster: Cluster) -> Iterator[Reader]:
    """Somebody in a checkout, whose own files stay out of this one, with a kubeconfig and a registry."""
    with reading(cluster.environment) as reader:
        for name in ("charts", "examples"):
            (reader.folder / name).symlink_to(ROOT / name)
        reader.knows(REGISTRY="localhost", TAG="dev")
        yield reader


def uninstall(cluster: Cluster) -> None:
    cluster.helm("uninstall", "stepkeeper", "--namespace", NAMESPACE, "--wait", "--ignore-not-found")


def commands_of(page: str) -> tuple[Block, ...]:
    """Return the blocks of a page that a shell runs: all but those that are marked as not run."""
    return tuple(block for block in read_blocks(page) if block.is_shell and not block.mark)


def job(cluster: Cluster, name: str) -> ClusterObject:
    return ClusterObject(cluster=cluster, kind="ctj", name=name)


def delete(cluster: Cluster, *objects: str, namespace: str = "default") -> None:
    cluster.kubectl(
        "delete", "--namespace", namespace, *objects, "--ignore-not-found", "--timeout=100s", timeout_s=110
    )


def test_readme(no_operator: Cluster, reader: Reader) -> None:
    page = "README.md"
    reader.opens(read_blocks(page))
    for block in commands_of(page):
        reader.does(block)
    llm = job(no_operator, "llm")
    llm.until(lambda status: status.get("phase"))
    delete(no_operator, "ctj/llm")


def test_install_page(no_operator: Cluster, reader: Reader) -> None:
    *installing, leaving = commands_of("docs/operations/install.md")
    for block in installing:
        reader.does(block)
    no_operator.kubectl("rollout", "status", "deployment", "-n", NAMESPACE, f"--timeout={LOOKS_FOR_S}s")
    history = no_operator.helm("history", "stepkeeper", "--namespace", NAMESPACE, "-o", "json")
    assert [revision["status"] for revision in json.loads(history)] == ["superseded", "deployed"]
    reader.does(leaving)
    kinds = "all,configmaps,leases,roles,rolebindings,secrets,serviceaccounts"
    left = no_operator.kubectl("get", kinds, "--namespace", NAMESPACE, "-o", "name").split()
    assert set(left) == {"configmap/kube-root-ca.crt", "serviceaccount/default"}
    roles = ("clusterroles,clusterrolebindings", "-l", "app.kubernetes.io/name=stepkeeper", "-o", "name")
    assert no_operator.kubectl("get", *roles) == ""


def copy_examples(folder: Path) -> Path:
    """Make a copy of text_lm whose job has torch and storage on this cluster. Its root is no other test's."""
    shutil.copytree(ROOT / "examples/text_lm", folder / "text_lm")
    manifest = folder / "text_lm/job.yaml"
    job = yaml.safe_load(manifest.read_text(encoding="utf-8"))
    job["spec"]["checkpoint"]["uri"] += "-of-the-page"
    manifest.write_text(yaml.safe_dump(for_test_cluster(job)), encoding="utf-8")
    return folder


@pytest.mark.usefixtures("trainer_image", "object_storage")
def test_text_lm_page_and_how_a_job_is_stopped(before_us: Cluster, reader: Reader) -> None:
    """The job of the example runs; suspended as docs/operations/damaged-log.md says, it ends, and runs again."""
    install_operator(before_us)
    reader.goes(copy_examples(reader.folder / "copied"))
    for block in commands_of("examples/text_lm/README.md"):
        reader.does(block)
    lm = job(before_us, "text-lm")
    lm.until_state("Running")
    reader.knows(JOB="text-lm")
    stop, start = (block for block in commands_of("docs/operations/damaged-log.md") if block.asks_cluster)
    reader.does(stop)
    lm.until_state("Suspended")
    reader.does(start)
    lm.until_state("Running")
    delete(before_us, "ctj/text-lm")


def test_queued_resources_page(cloud: QueuedResources, reader: Reader) -> None:
    page = "docs/operations/queued-resources.md"
    reader.opens(read_blocks(page))
    for block in commands_of(page):
        reader.does(block, looks_for_s=LOOKS_FOR_S)
    assert cloud.in_cloud() == {"ml-v5e-16": "WAITING_FOR_RESOURCES"}
    delete(cloud.cluster, "qr/v5e-16", namespace="ml")
    assert not cloud.in_cloud()


def test_queued_resource_example(cloud: QueuedResources, reader: Reader) -> None:
    """Its reader takes the machine's own credentials, thinks better of it, and federates the cluster."""
    page = "examples/queued_resource/README.md"
    reader.knows(NUMBER=_NUMBER)
    delete(cloud.cluster, "secret/join-cluster")
    blocks = list(commands_of(page))
    (own,) = (block for block in blocks if block.text == "CREDENTIALS=cloudTPU.credentialsSecret=\n")
    (turn_on,) = (block for block in blocks if "cloudTPU.enabled=true" in block.text)
    federated = blocks[: blocks.index(own)]
    reader.does(own)
    reader.does(turn_on)
    for block in federated:
        reader.does(block)
        if "jwks.json" in block.text:
            assert json.loads((reader.folder / "jwks.json").read_text())["keys"]
            (reader.folder / "credentials.json").write_text(json.dumps(FEDERATED))
    for block in blocks[blocks.index(turn_on) :]:
        reader.does(block)
    cloud.find("v5e-16").until_state("WaitingForResources")
    assert cloud.in_cloud() == {"default-v5e-16": "WAITING_FOR_RESOURCES"}
    (request,) = cloud.cloud.state()["queued_resources"]
    script = (ROOT / "examples/queued_resource/join-kubeadm.sh").read_text(encoding="utf-8")
    assert json.dumps(script)[1:-1] in json.dumps(request)
    delete(cloud.cluster, "ctj/text-lm", "qr/v5e-16", "secret/join-cluster")
    delete(cloud.cluster, "secret/cloud-tpu", namespace=NAMESPACE)
