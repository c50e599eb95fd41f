"""Test that the chart's roles allow, by the API server's own answers, what the operator needs and no more."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from stepcluster import binaries
from stepcluster.api import Cluster
from stepcluster.errors import CommandError
from stepcluster.machine import run

CHART = Path(__file__).parents[2] / "charts/stepkeeper"
NAMESPACE = "chart-rbac"
OPERATOR = f"system:serviceaccount:{NAMESPACE}:chart-rbac-stepkeeper-operator"
CLOUD_TPU = (
    "--set",
    "cloudTPU.enabled=true,cloudTPU.credentialsSecret=key",
    "--set",
    "cloudTPU.startupScriptSecrets[0].namespace=default,cloudTPU.startupScriptSecrets[0].name=join",
)
NETWORK_POLICY = (
    "--set",
    "networkPolicy.enabled=true,networkPolicy.reportsFrom[0].ipBlock.cidr=10.128.0.0/20",
    "--set",
    "networkPolicy.metricsFrom[0].namespaceSelector.matchLabels.team=monitoring",
)
WATCHING = ("--set", "watchNamespaces={default},podDisruptionBudget.maxUnavailable=0")
WATCHER = f"system:serviceaccount:{NAMESPACE}:watcher-stepkeeper-operator"

pytestmark = pytest.mark.cluster


def render(*options: str, release: str = "chart-rbac") -> str:
    helm = binaries.ensure()["helm"]
    return run([helm, "template", release, CHART, "-n", NAMESPACE, "--kube-version", "1.36.3", *options])


def render_roles(*options: str, release: str = "chart-rbac") -> str:
    """Render the chart's roles without its Deployment."""
    kinds = {"ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"}
    objects = yaml.safe_load_all(render(*options, release=release))
    return yaml.safe_dump_all([each for each in objects if each and each["kind"] in kinds])


@pytest.fixture(scope="module")
def namespace(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The namespace of the release, and the kinds that its roles are about."""
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", CHART / "crds")
    cluster.kubectl("create", "namespace", NAMESPACE)
    yield cluster
    cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


@pytest.fixture(scope="module")
def installed(namespace: Cluster) -> Iterator[Cluster]:
    """Install the chart's roles, and delete them."""
    roles = render_roles()
    namespace.kubectl("apply", "-f", "-", stdin=roles)
    yield namespace
    namespace.kubectl("delete", "--ignore-not-found", "-f", "-", stdin=roles)


@pytest.fixture(scope="module")
def watching(namespace: Cluster) -> Iterator[Cluster]:
    """Install the roles of an operator that watches namespace default, and delete them."""
    roles = render_roles(*WATCHING, release="watcher")
    namespace.kubectl("apply", "-f", "-", stdin=roles)
    yield namespace
    namespace.kubectl("delete", "--ignore-not-found", "-f", "-", stdin=roles)


def can(cluster: Cluster, namespace: str, request_line: str, account: str = OPERATOR) -> bool:
    """kubectl answers no with an error. The request is verb, resource and maybe a subresource or a name."""
    verb, resource, *rest = request_line.split()
    options = ("--as", account, "--namespace", namespace, *rest)
    try:
        return cluster.kubectl("auth", "can-i", verb, resource, *options).strip() == "yes"
    except CommandError as error:
        if str(error).split()[-1] != "no":
            raise
        return False


@pytest.mark.parametrize(
    "options",
    [(), CLOUD_TPU, NETWORK_POLICY, WATCHING],
    ids=["jobs alone", "with Cloud TPU", "with a NetworkPolicy", "one namespace"],
)
def test_the_api_server_takes_every_object_of_the_chart(installed: Cluster, options: tuple[str, ...]) -> None:
    text = render(*options)
    answers = installed.kubectl("apply", "--dry-run=server", "-f", "-", stdin=text).splitlines()
    assert len(answers) == text.count("\nkind: ")


@pytest.mark.parametrize(
    "request_line",
    [
        "get secrets",
        "create secrets",
        "update leases.coordination.k8s.io",
        "patch ctj.stepkeeper.dev",
        "delete events.events.k8s.io",
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


@pytest.mark.parametrize(
    ("namespace_name", "request_line", "allowed"),
    [
        ("default", "list pods", True),
        ("default", "create jobsets.jobset.x-k8s.io", True),
        ("default", "patch ctj.stepkeeper.dev --subresource=status", True),
        ("kube-system", "list pods", False),
        ("kube-system", "create jobsets.jobset.x-k8s.io", False),
        ("default", "list pods --all-namespaces", False),
        ("default", "list nodes --all-namespaces", True),
        ("default", "list leases.coordination.k8s.io --all-namespaces", True),
        ("default", "create tokenreviews.authentication.k8s.io --all-namespaces", True),
    ],
)
def test_an_operator_that_watches_one_namespace_may_do_nothing_in_others(
    watching: Cluster, namespace_name: str, request_line: str, *, allowed: bool
) -> None:
    assert can(watching, namespace_name, request_line, WATCHER) is allowed
