"""What a cluster gets before a demo's story begins on it: the operator, the trainer's image, a way to the storage."""

import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stepcluster import images
from stepcluster.api import Cluster
from stepcluster.product import install_operator

__all__ = ["ROOT", "TRAINING", "furnish", "say"]

ROOT = Path(__file__).parents[2]
TRAINING = ROOT / "examples" / "text_lm"

# Made short for an audience: by default pods report every 10 s.
_REPORT_INTERVAL_S = 2


def furnish(
    cluster: Cluster, *, chart_values: Mapping[str, int | str] | None = None, image: str | None = None
) -> None:
    """Install the operator, with these values too, and load the trainer's image, under another name if one is given."""
    began_s = time.monotonic()
    images.build_wheel()
    with ThreadPoolExecutor() as executor:
        trainer = executor.submit(cluster.load_trainer_image, TRAINING, name=image)
        install_operator(cluster, more=chart_values, reportIntervalSeconds=_REPORT_INTERVAL_S)
        trainer.result()
    # How the library finds storage that isn't Google's: in the pods by this ConfigMap, here by the variable.
    address = f"--from-literal=STORAGE_EMULATOR_HOST={cluster.gcs_url}"
    cluster.kubectl("create", "configmap", "object-storage", address)
    os.environ["STORAGE_EMULATOR_HOST"] = cluster.gcs_url
    say(f"operator installed with Helm and images loaded in {time.monotonic() - began_s:.0f} s")


def say(text: str) -> None:
    """Print a line that is not about the job."""
    print(f"      {text}", flush=True)
