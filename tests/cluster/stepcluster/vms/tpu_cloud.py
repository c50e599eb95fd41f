"""A Cloud TPU API beside the test cluster, whose machines join it for real."""

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from stepcluster.api import Cluster
from stepcluster.vms.joining import JoinTerms
from tpuapi.remote import RemoteTpu, started

ROOT = Path(__file__).parents[4]
JOIN_SCRIPT = ROOT / "examples" / "queued_resource" / "join-kubeadm.sh"
JOIN_SECRET = "join-cluster"
PROJECT = "a-project"
ZONE = "us-west4-a"
TIMINGS: Mapping[str, float] = {
    "creating_s": 1,
    "provisioning_s": 3,
    "node_skew_s": 0.5,
    "suspending_s": 2,
    "deleting_s": 1,
    "preempted_s": 2,
    "repairing_s": 5,
    "autocheckpoint_grace_s": 120,
}
"""How long things take here; a cloud takes minutes."""


def join_script(terms: JoinTerms) -> str:
    """Fill the example's startup script in, as its README tells users to."""
    settings = {
        "API_SERVER=API-SERVER:6443": f"API_SERVER={terms.endpoint}",
        "CA_CERT_HASH=sha256:CA-CERT-HASH": f"CA_CERT_HASH={terms.ca_cert_hash}",
        "TOKEN=\n": f"TOKEN={terms.token}\n",
    }
    text = JOIN_SCRIPT.read_text(encoding="utf-8")
    for line, setting in settings.items():
        assert text.count(f"\n{line}") == 1, line
        text = text.replace(f"\n{line}", f"\n{setting}")
    return text


def put_join_secret(cluster: Cluster, *, namespace: str = "default") -> None:
    """Put the startup script where a QueuedResource's startupScriptSecretRef finds it, with a token of a day."""
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": JOIN_SECRET, "namespace": namespace},
        "stringData": {"startup-script": join_script(cluster.join_terms())},
    }
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(secret))


def chart_values(remote: RemoteTpu, *, namespace: str = "default") -> dict[str, int | str]:
    """Return the chart's values by which the operator asks this service, often, and may read the startup script."""
    return {
        "cloudTPU.enabled": "true",
        "cloudTPU.endpoint": remote.address,
        "cloudTPU.insecure": "true",
        "cloudTPU.pollSeconds": 1,
        "cloudTPU.idlePollSeconds": 2,
        "cloudTPU.quotaRetrySeconds": 2,
        "cloudTPU.startupScriptSecrets[0].namespace": namespace,
        "cloudTPU.startupScriptSecrets[0].name": JOIN_SECRET,
    }


@contextlib.contextmanager
def tpu_cloud_beside(
    cluster: Cluster, *, n_nodes: int = 2, timings: Mapping[str, float] = TIMINGS
) -> Iterator[RemoteTpu]:
    """Run a Cloud TPU API that the cluster's pods reach. The machines of its first `n_nodes` nodes join the cluster.

    All others exist in the API only.
    """
    hook = f"{sys.executable} -m stepcluster.vms.tpu_events {cluster.name}"
    options = [f"--host={cluster.host_address}", "--hook", hook, f"--hook-nodes={n_nodes}"]
    options += [f"--timing={name}={seconds}" for name, seconds in timings.items()]
    try:
        with started(*options) as remote:
            yield remote
    finally:
        for name in cluster.vms.names():
            cluster.vms.stop(name, grace_s=0)
            cluster.kubectl("delete", "node", name, "--ignore-not-found")
