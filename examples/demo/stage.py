"""The cluster, the operator and the object storage that the demo plays on."""

import contextlib
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stepcluster import images
from stepcluster.api import Cluster, cluster_up
from stepcluster.product import install_operator

__all__ = ["JOB_FILE", "ROOT", "open_stage"]

ROOT = Path(__file__).parents[2]
JOB_FILE = ROOT / "examples" / "text_lm" / "job.yaml"

_NAME = "demo"
# Made short for an audience: by default pods report every 10 s.
_REPORT_INTERVAL_S = 2


@contextlib.contextmanager
def open_stage(*, keep: bool) -> Iterator[Cluster]:
    """Start a cluster with the operator installed and the trainer's image on its nodes, and take it down afterwards.

    With `keep` it goes on running, and a message says how to use it and how to end it.
    """
    began_s = time.monotonic()
    _say("starting a cluster: API server, a system node, two nodes with four TPU chips each, object storage")
    with cluster_up(_NAME, keep=keep) as cluster:
        _say(f"cluster ready after {time.monotonic() - began_s:.0f} s")
        _say(
            "a node is given up after 20 s of silence here and its pods 5 s later; elsewhere that is minutes"
        )
        images.build_wheel()
        with ThreadPoolExecutor() as executor:
            trainer = executor.submit(cluster.load_trainer_image, JOB_FILE.parent)
            install_operator(cluster, reportIntervalSeconds=_REPORT_INTERVAL_S)
            trainer.result()
        _say(f"operator installed with Helm and images loaded after {time.monotonic() - began_s:.0f} s")
        # How the library finds storage that isn't Google's: in the pods by this ConfigMap, here by the variable.
        address = f"--from-literal=STORAGE_EMULATOR_HOST={cluster.gcs_url}"
        cluster.kubectl("create", "configmap", "object-storage", address)
        os.environ["STORAGE_EMULATOR_HOST"] = cluster.gcs_host_url
        yield cluster
    if keep:
        _say(f'the cluster goes on: eval "$(.venv/bin/python -m stepcluster env --name {_NAME})"')
        _say(f"to end it: make cluster-down NAME={_NAME}")


def _say(text: str) -> None:
    print(f"      {text}", flush=True)
