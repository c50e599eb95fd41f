"""The real API server's answers to manifests: each rule accepts what is right and says what to write instead."""

import re
from pathlib import Path
from typing import Protocol

import pytest
import yaml

from stepcluster import binaries
from stepcluster.errors import CommandError
from stepkeeper_operator.crds.pod_template import pod_template_schema, trim_pod_template

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "tests/data/crd"
CRD = "crd/checkpointedtrainingjobs.stepkeeper.dev"


class Cluster(Protocol):
    def kubectl(self, *args: str) -> str: ...


@pytest.fixture(scope="module")
def kubectl(cluster: Cluster) -> Cluster:
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(ROOT / "crds"))
    cluster.kubectl("wait", "--for=condition=Established", CRD, "--timeout=60s")
    return cluster


def manifests(folder: str) -> list[Path]:
    return sorted((MANIFESTS / folder).glob("*.yaml"))


@pytest.mark.cluster
@pytest.mark.parametrize("path", manifests("accepted"), ids=lambda path: path.stem)
def test_a_right_manifest_is_accepted(kubectl: Cluster, path: Path) -> None:
    assert "created (server dry run)" in kubectl.kubectl("apply", "--dry-run=server", "-f", str(path))


@pytest.mark.cluster
@pytest.mark.parametrize("path", manifests("refused"), ids=lambda path: path.stem)
def test_a_wrong_manifest_is_refused_with_words_that_help(kubectl: Cluster, path: Path) -> None:
    message = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
    with pytest.raises(CommandError, match=re.escape(message)):
        kubectl.kubectl("apply", "--dry-run=server", "-f", str(path))


@pytest.mark.cluster
def test_defaults_are_in_the_object_so_that_an_upgrade_changes_no_job(kubectl: Cluster) -> None:
    path = MANIFESTS / "accepted/minimal.yaml"
    spec = yaml.safe_load(kubectl.kubectl("apply", "--dry-run=server", "-o", "yaml", "-f", str(path)))["spec"]
    assert spec["suspend"] is False
    assert spec["checkpoint"]["retention"] == {"last": 3}
    assert spec["restarts"]["backoff"] == {"initialSeconds": 10, "maxSeconds": 600}
    assert spec["placement"]["tpu"]["provisioning"] == "OnDemand"


@pytest.mark.cluster
def test_client_side_apply_takes_the_crd_too(kubectl: Cluster) -> None:
    assert "(server dry run)" in kubectl.kubectl("apply", "--dry-run=server", "-f", str(ROOT / "crds"))


@pytest.mark.cluster
def test_people_can_ask_what_a_field_means(kubectl: Cluster) -> None:
    assert "gs://bucket/prefix" in kubectl.kubectl("explain", "ctj.spec.checkpoint.uri")


def test_the_pod_template_is_that_of_the_pinned_jobset() -> None:
    crd = yaml.safe_load(binaries.ensure().jobset_crd.read_text(encoding="utf-8"))
    assert trim_pod_template(crd) == pod_template_schema()
