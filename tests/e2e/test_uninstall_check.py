"""Test that `helm uninstall` is refused while machines would be left in the cloud."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from stepcluster.api import Cluster
from stepcluster.errors import CommandError

ROOT: Final = Path(__file__).parents[2]
RELEASE: Final = "leaving"
NAMESPACE: Final = "leaving"
RESOURCE: Final = ROOT / "tests/data/crd/queuedresources/accepted/minimal.yaml"

pytestmark = pytest.mark.cluster


@pytest.fixture
def release(cluster: Cluster) -> Iterator[Cluster]:
    """A release with Cloud TPU whose operator finds no node: only its check runs."""
    image = cluster.load_operator_image()
    repository, _, tag = image.rpartition(":")
    values = {
        "image.repository": repository,
        "image.tag": tag,
        "image.pullPolicy": "Never",
        "cloudTPU.enabled": "true",
        "resources.requests.cpu": "1000",
    }
    assignments = ",".join(f"{name}={value}" for name, value in values.items())
    chart = ROOT / "charts/stepkeeper"
    options = ("--namespace", NAMESPACE, "--create-namespace", "--set", assignments)
    cluster.helm("install", RELEASE, chart, *options, timeout_s=250)
    cluster.wait_established("queuedresources.stepkeeper.dev")
    yield cluster
    cluster.kubectl("delete", "--ignore-not-found", "-f", str(RESOURCE), "--timeout=110s")
    cluster.helm("uninstall", RELEASE, "--namespace", NAMESPACE, "--ignore-not-found", "--no-hooks")
    cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


def uninstall(cluster: Cluster) -> str:
    """Uninstall the release. Return the objection; empty if there was none."""
    try:
        cluster.helm("uninstall", RELEASE, "--namespace", NAMESPACE, "--timeout", "120s", timeout_s=150)
    except CommandError as error:
        return str(error)
    return ""


def test_an_uninstallation_waits_for_the_machines(release: Cluster) -> None:
    release.kubectl("apply", "-f", str(RESOURCE))
    assert uninstall(release)
    job = ("--namespace", NAMESPACE, f"job/{RELEASE}-stepkeeper-uninstall-check")
    said = release.kubectl("logs", *job)
    assert "1 QueuedResource needs the operator" in said
    assert "default/v5e" in said
    assert release.kubectl("get", "deployment", "--namespace", NAMESPACE, "-o", "name").strip(), (
        "the operator stays"
    )
    release.kubectl("delete", "-f", str(RESOURCE), "--timeout=110s")
    assert uninstall(release) == ""
    assert release.kubectl("get", "deployment", "--namespace", NAMESPACE, "-o", "name").strip() == ""
