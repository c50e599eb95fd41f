"""Test that the chart's roles allow, by the API server's own answers, what the operator needs and no more."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
import yaml

from stepcluster import binaries
from stepcluster.errors import CommandError
from stepcluster.machine import run

ROOT = Path(__file__).parents[2]
NAMESPACE = "chart-rbac"
OPERATOR = f"system:serviceaccount:{NAMESPACE}:chart-rbac-stepkeeper-operator"

pytestmark = pytest.mark.cluster


class Cluster(Protocol):
    def kubectl(self, *args: str) -> str: ...


CLOUD_TPU = (
    "--set",
    "cloudTPU.enabled=true,cloudTPU.credentialsSecret=key",
    "--set",
    "cloudTPU.startupScriptSecrets[0].namespace=default,cloudTPU.startupScriptSecrets[0].name=join",
)


def render(*options: str) -> str:
    chart = ROOT / "charts/stepkeeper"
    helm = binaries.ensure()["helm"]
    return run([helm, "template", "chart-rbac", chart, "-n", NAMESPACE, "--kube-version", "1.36.3", *options])


def install_roles(cluster: Cluster, folder: Path, *options: str) -> Iterator[Cluster]:
    """Install the chart's roles without its Deployment, and delete them."""
    kinds = {"ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"}
    file = folder / "roles.yaml"
    roles = [
        document
        for document in yaml.safe_load_all(render(*options))
        if document and document["kind"] in kinds
    ]
    file.write_text(yaml.safe_dump_all(roles))
    cluster.kubectl("apply", "-f", str(file))
    yield cluster
    cluster.kubectl("delete", "--ignore-not-found", "-f", str(file))


@pytest.fixture(scope="module")
def namespace(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The namespace of the release, and the kinds that its roles are about."""
    file = tmp_path_factory.mktemp("chart") / "namespace.yaml"
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    file.write_text(yaml.safe_dump(body))
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(ROOT / "charts/stepkeeper/crds"))
    cluster.kubectl("apply", "-f", str(file))
    yield cluster
    cluster.kubectl("delete", "-f", str(file), "--wait=false")


@pytest.fixture(scope="module")
def installed(namespace: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    yield from install_roles(namespace, tmp_path_factory.mktemp("chart"))


@pytest.mark.parametrize("options", [(), CLOUD_TPU], ids=["jobs alone", "with Cloud TPU"])
def test_the_api_server_takes_every_object_of_the_chart(
    installed: Cluster, tmp_path: Path, options: tuple[str, ...]
) -> None:
    file = tmp_path / "chart.yaml"
    file.write_text(render(*options))
    answers = installed.kubectl("apply", "--dry-run=server", "-f", str(file)).splitlines()
    assert len(answers) == render(*options).count("\nkind: ")


def can(cluster: Cluster, namespace: str, request_line: str) -> bool:
    """kubectl answers no with an error. The request is verb, resource and maybe a subresource or a name."""
    verb, resource, *rest = request_line.split()
    options = ("--as", OPERATOR, "--namespace", namespace, *rest)
    try:
        return cluster.kubectl("auth", "can-i", verb, resource, *options).strip() == "yes"
    except CommandError as error:
        if str(error).split()[-1] != "no":
            raise
        return False


@pytest.mark.parametrize(
    "request_line",
    [
        "watch ctj.stepkeeper.dev",
        "patch ctj.stepkeeper.dev --subresource=status",
        "create jobsets.jobset.x-k8s.io",
        "patch jobsets.jobset.x-k8s.io",
        "delete jobsets.jobset.x-k8s.io",
        "watch pods",
        "patch pods --subresource=status",
        "delete pods",
        "patch configmaps",
        "create events.events.k8s.io",
        "list leases.coordination.k8s.io --all-namespaces",
    ],
)
def test_the_operator_may_do_its_work_in_any_namespace(installed: Cluster, request_line: str) -> None:
    assert can(installed, "default", request_line)


@pytest.mark.parametrize(
    "request_line",
    [
        "get secrets",
        "create secrets",
        "update leases.coordination.k8s.io",
        "patch ctj.stepkeeper.dev",
        "create pods",
        "create pods --subresource=exec",
        "delete jobs.batch",
        "delete configmaps",
        "create jobs.batch",
        "create serviceaccounts --subresource=token",
        "impersonate users",
        "watch qr.stepkeeper.dev",
        "patch nodes --all-namespaces",
        "delete nodes --all-namespaces",
        "create pods --subresource=eviction",
        "get namespaces/kube-system --all-namespaces",
    ],
)
def test_the_operator_may_do_nothing_else_there(installed: Cluster, request_line: str) -> None:
    assert not can(installed, "default", request_line)


@pytest.mark.parametrize(
    ("request_line", "allowed"),
    [
        ("get secrets/chart-rbac-stepkeeper-operator-tls", True),
        ("get secrets/another", False),
        ("list secrets", False),
        ("update leases.coordination.k8s.io/chart-rbac-stepkeeper-operator", True),
        ("update leases.coordination.k8s.io/another", False),
    ],
)
def test_at_home_the_operator_has_its_certificate_and_its_lease(
    installed: Cluster, request_line: str, *, allowed: bool
) -> None:
    assert can(installed, NAMESPACE, request_line) is allowed


@pytest.fixture(scope="module")
def with_cloud(namespace: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The roles of a release with Cloud TPU. It comes after the tests of one without."""
    yield from install_roles(namespace, tmp_path_factory.mktemp("chart"), *CLOUD_TPU)


@pytest.mark.parametrize(
    ("request_line", "allowed"),
    [
        ("watch qr.stepkeeper.dev", True),
        ("patch qr.stepkeeper.dev", True),
        ("patch qr.stepkeeper.dev --subresource=status", True),
        ("create qr.stepkeeper.dev", False),
        ("delete qr.stepkeeper.dev", False),
        ("patch nodes --all-namespaces", True),
        ("delete nodes --all-namespaces", True),
        ("create nodes --all-namespaces", False),
        ("create pods --subresource=eviction", True),
        ("get namespaces/kube-system --all-namespaces", True),
        ("get namespaces/default --all-namespaces", False),
        ("get secrets/join", True),
        ("get secrets/another", False),
        ("list secrets", False),
    ],
)
def test_with_cloud_tpu_the_operator_may_do_its_work_and_read_the_named_secrets(
    with_cloud: Cluster, request_line: str, *, allowed: bool
) -> None:
    assert can(with_cloud, "default", request_line) is allowed
