"""The chart refuses to be installed beside CRDs of another version: Helm upgrades none."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from stepcluster.api import Cluster
from stepcluster.errors import CommandError

ROOT: Final = Path(__file__).parents[2]
CHART: Final = ROOT / "charts/stepkeeper"
CRD: Final = "checkpointedtrainingjobs.stepkeeper.dev"
DIGEST: Final = "stepkeeper.dev/crd-digest"

pytestmark = pytest.mark.cluster


@pytest.fixture
def old_crd(cluster: Cluster) -> Iterator[Cluster]:
    """A cluster whose CRD is of another version of the chart."""
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CHART / f"crds/{CRD}.yaml"))
    cluster.kubectl("annotate", "--overwrite", f"crd/{CRD}", f"{DIGEST}=another")
    yield cluster
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CHART / f"crds/{CRD}.yaml"))


def render(cluster: Cluster, *options: str) -> str:
    """Render the chart for an installation, as the API server would get it."""
    where = ("--namespace", "beside", "--dry-run=server")
    return cluster.helm("install", "beside", CHART, *where, *options, timeout_s=250)


def test_crds_of_another_version_are_refused_with_the_command_that_upgrades_them(old_crd: Cluster) -> None:
    with pytest.raises(CommandError) as caught:
        render(old_crd)
    assert f"CRD {CRD} in the cluster is not the one of chart stepkeeper" in str(caught.value)
    assert "| kubectl apply --server-side --force-conflicts -f -" in str(caught.value)
    assert "kind: Deployment" in render(old_crd, "--set", "crdCheck=false")


def test_crds_of_a_later_version_are_no_obstacle(old_crd: Cluster) -> None:
    """They have all fields, and older ones in their place would drop those that jobs use."""
    old_crd.kubectl("annotate", "--overwrite", f"crd/{CRD}", "stepkeeper.dev/crd-version=99.0.0")
    assert "kind: Deployment" in render(old_crd)


def test_the_charts_own_crds_are_no_obstacle(old_crd: Cluster) -> None:
    folder = str(CHART / "crds")
    old_crd.kubectl("apply", "--server-side", "--force-conflicts", "-f", folder)
    assert "kind: Deployment" in render(old_crd, "--set", "cloudTPU.enabled=true")
