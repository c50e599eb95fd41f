"""stepkeeper on a test cluster, installed as its users install it: by its Helm chart, from the built wheel."""

from collections.abc import Mapping
from typing import Final

from stepcluster.api import Cluster
from stepcluster.releases import TREE, Version

NAMESPACE: Final = "stepkeeper"
_TOLERATION_S: Final = 5
"""Seconds that pods stay on an unreachable node here; the chart's own value is 30."""


def install_operator(
    cluster: Cluster,
    *,
    version: Version = TREE,
    more: Mapping[str, int | str] | None = None,
    **settings: int | str,
) -> None:
    """Install the operator from its image, or upgrade it, with the chart's settings, and wait until it takes reports.

    `more` are other values of the chart, by their paths.
    """
    image = cluster.load_operator_image(version.wheel, tag=version.name)
    repository, _, tag = image.rpartition(":")
    values: dict[str, int | str] = {
        "image.repository": repository,
        "image.tag": tag,
        "image.pullPolicy": "Never",
        "settings.unreachableTolerationSeconds": _TOLERATION_S,
        **{f"settings.{name}": value for name, value in settings.items()},
        **(more or {}),
    }
    assignments = ",".join(f"{name}={value}" for name, value in values.items())
    options = [
        f"--namespace={NAMESPACE}",
        "--create-namespace",
        "--set",
        assignments,
        "--wait",
        "--timeout=240s",
    ]
    # Helm upgrades no CRDs, and a cluster that is used again may have older ones.
    apply_crds(cluster, version)
    cluster.helm("upgrade", "--install", "stepkeeper", version.chart, *options, timeout_s=270)


def apply_crds(cluster: Cluster, version: Version) -> None:
    """Put the CRDs of that version in place of those that the cluster has."""
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(version.crds))
