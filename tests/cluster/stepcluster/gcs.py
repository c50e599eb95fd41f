"""Object storage that speaks Google Cloud Storage's protocol, outside every node: it survives their power cuts."""

import urllib.error
import urllib.request

from stepcluster.binaries import Binaries
from stepcluster.layout import GCS_PORT, Layout
from stepcluster.machine import wait_until
from stepcluster.processes import Launcher

BUCKET = "checkpoints"


def start(launcher: Launcher, binaries: Binaries, layout: Layout) -> None:
    """Start the storage, with one bucket. It answers by HTTP at one URL for pods and the machine alike."""
    (layout.folder / "storage-seed" / BUCKET).mkdir(parents=True)
    arguments = [
        "-scheme=http",
        f"-host={layout.address}",
        f"-port={GCS_PORT}",
        f"-external-url={layout.gcs_url}",
        f"-public-host={layout.address}:{GCS_PORT}",
        "-backend=memory",
        f"-data={layout.folder / 'storage-seed'}",
        "-log-level=warn",
    ]
    log = launcher.start("fake-gcs-server", [binaries["fake-gcs-server"], *arguments])
    wait_until(lambda: _answers(layout), "object storage", timeout_s=120, log=log)


def _answers(layout: Layout) -> bool:
    try:
        with urllib.request.urlopen(f"{layout.gcs_url}/storage/v1/b/{BUCKET}", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False
