"""The real API server's answers to manifests: each rule accepts what is right and says what to write instead."""

import json
from pathlib import Path

import pytest
import yaml

from stepcluster import binaries
from stepcluster.api import Cluster
from stepcluster.errors import CommandError
from stepkeeper_operator.crds.pod_template import pod_template_schema, trim_pod_template

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "charts/stepkeeper/crds"
MANIFESTS = ROOT / "tests/data/crd"
QUEUED_RESOURCES = MANIFESTS / "queuedresources"
CRDS = ("checkpointedtrainingjobs.stepkeeper.dev", "queuedresources.stepkeeper.dev")
UNKNOWN_FIELD = MANIFESTS / "refused/unknown-field.yaml"


@pytest.fixture(scope="module")
def kubectl(cluster: Cluster) -> Cluster:
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(FOLDER))
    for crd in CRDS:
        cluster.wait_established(crd)
    return cluster


def refusal(cluster: Cluster, path: Path, *options: str) -> str:
    """Return the API server's objection to the manifest; empty if there is none."""
    try:
        cluster.kubectl("apply", "--dry-run=server", *options, "-f", str(path))
    except CommandError as error:
        return str(error)
    return ""


def manifests(folder: str) -> list[Path]:
    """List the manifests of both kinds in the folders of that name."""
    return [path for kind in (MANIFESTS, QUEUED_RESOURCES) for path in sorted((kind / folder).glob("*.yaml"))]


def name_of(path: Path) -> str:
    return str(path.relative_to(MANIFESTS).with_suffix(""))


@pytest.mark.cluster
@pytest.mark.parametrize("path", manifests("accepted"), ids=name_of)
def test_a_right_manifest_is_accepted(kubectl: Cluster, path: Path) -> None:
    assert "created (server dry run)" in kubectl.kubectl("apply", "--dry-run=server", "-f", str(path))


@pytest.mark.cluster
@pytest.mark.parametrize("path", manifests("refused"), ids=name_of)
def test_a_wrong_manifest_is_refused_with_words_that_help(kubectl: Cluster, path: Path) -> None:
    assert path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ") in refusal(kubectl, path)


def change(cluster: Cluster, path: Path) -> str:
    """Make the manifest's first object, and ask for it to become the second. Return the answer.

    A creation drops the status, which the operator writes.
    """
    before, after = path.read_text(encoding="utf-8").split("---\n")
    cluster.kubectl("create", "-f", "-", stdin=before)
    status = json.dumps({"status": yaml.safe_load(before).get("status")})
    try:
        cluster.kubectl(
            "patch", "-f", "-", "--subresource=status", "--type=merge", "-p", status, stdin=before
        )
        return cluster.kubectl("replace", "--dry-run=server", "-f", "-", stdin=after)
    except CommandError as error:
        return str(error)
    finally:
        cluster.kubectl("delete", "-f", "-", "--timeout=110s", stdin=before)


@pytest.mark.cluster
@pytest.mark.parametrize("path", manifests("changes-accepted"), ids=name_of)
def test_a_change_that_can_be_made_is_accepted(kubectl: Cluster, path: Path) -> None:
    assert "replaced (server dry run)" in change(kubectl, path)


@pytest.mark.cluster
@pytest.mark.parametrize("path", manifests("changes-refused"), ids=name_of)
def test_a_change_that_can_not_be_made_is_refused_with_what_to_do(kubectl: Cluster, path: Path) -> None:
    assert path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ") in change(kubectl, path)


@pytest.mark.cluster
def test_what_is_being_deleted_can_lose_its_finalizer_whatever_its_spec(kubectl: Cluster) -> None:
    """Rules that came after an object must not keep it: only what changes is checked."""
    path = QUEUED_RESOURCES / "accepted/minimal.yaml"
    kubectl.kubectl("apply", "-f", str(path))
    kubectl.kubectl("patch", "qr", "v5e", "--type=merge", "-p", '{"metadata":{"finalizers":["x.dev/y"]}}')
    kubectl.kubectl("delete", "qr", "v5e", "--wait=false")
    kubectl.kubectl("patch", "qr", "v5e", "--type=merge", "-p", '{"metadata":{"finalizers":null}}')
    kubectl.kubectl("wait", "--for=delete", "qr/v5e", "--timeout=110s")


@pytest.mark.cluster
def test_server_side_apply_refuses_an_unknown_field_whatever_the_client_asks_for(kubectl: Cluster) -> None:
    said = refusal(kubectl, UNKNOWN_FIELD, "--server-side", "--validate=false")
    assert ".spec.checkpoint.every: field not declared in schema" in said


@pytest.mark.cluster
def test_of_a_client_that_asks_for_no_validation_an_unknown_field_is_dropped(kubectl: Cluster) -> None:
    options = ("--dry-run=server", "--validate=false", "-o", "yaml")
    made = kubectl.kubectl("apply", *options, "-f", str(UNKNOWN_FIELD))
    checkpoint = yaml.safe_load(made)["spec"]["checkpoint"]
    assert checkpoint["interval"]["every"]["steps"] == 500
    assert "every" not in checkpoint


@pytest.mark.cluster
def test_defaults_are_in_the_object_so_that_an_upgrade_changes_no_job(kubectl: Cluster) -> None:
    path = MANIFESTS / "accepted/minimal.yaml"
    spec = yaml.safe_load(kubectl.kubectl("apply", "--dry-run=server", "-o", "yaml", "-f", str(path)))["spec"]
    assert spec["suspend"] is False
    assert spec["checkpoint"]["retention"] == {"last": 3}
    assert spec["restarts"]["backoff"] == {"initialSeconds": 10, "maxSeconds": 600}
    assert spec["placement"]["tpu"]["provisioning"] == "OnDemand"
    path = QUEUED_RESOURCES / "accepted/minimal.yaml"
    spec = yaml.safe_load(kubectl.kubectl("apply", "--dry-run=server", "-o", "yaml", "-f", str(path)))["spec"]
    assert (spec["updatePolicy"], spec["deletionPolicy"], spec["slices"]["count"]) == ("Refuse", "Delete", 1)
    assert spec["recreatePolicy"]["backoff"] == {"initialSeconds": 30, "maxSeconds": 1800}


@pytest.mark.cluster
def test_client_side_apply_takes_the_crd_too(kubectl: Cluster) -> None:
    assert "(server dry run)" in kubectl.kubectl("apply", "--dry-run=server", "-f", str(FOLDER))


@pytest.mark.cluster
def test_whoever_applies_the_crds_next_changes_nothing(kubectl: Cluster) -> None:
    """Helm refuses to install a CRD where it would change what another client has applied."""
    for crd in CRDS:
        path = FOLDER / f"{crd}.yaml"
        kubectl.kubectl("apply", "--server-side", "--field-manager=another", "-f", str(path))


def test_the_pod_template_is_that_of_the_pinned_jobset() -> None:
    crd = yaml.safe_load(binaries.ensure().jobset_crd.read_text(encoding="utf-8"))
    assert trim_pod_template(crd) == pod_template_schema()
