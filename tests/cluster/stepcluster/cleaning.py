"""Ending a cluster, whether it runs, half started or crashed, and leaving the machine as it was."""

import subprocess
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from stepcluster import cgroups, network, state
from stepcluster.layout import Layout
from stepcluster.machine import run, say, wait_until
from stepcluster.processes import CLUSTER_MARK, kill_marked, marked

GRACE_S = 100.0
PATIENCE_S = 10.0
"""Longest wait until the files are deleted: on a healthy disk it takes two or three seconds."""


def own_groups(cluster: str, groups: Iterable[str], *, others: Iterable[str]) -> list[str]:
    """Select this cluster's groups.

    Cluster `a` must not take groups of cluster `a-b` for its own: its own are those that no longer name claims.
    """
    longer = tuple(f"stepkeeper-{other}-" for other in others if other.startswith(f"{cluster}-"))
    return [
        name for name in groups if name.startswith(f"stepkeeper-{cluster}-") and not name.startswith(longer)
    ]


def own_mounts(folder: Path, mounts: Iterable[Path]) -> list[Path]:
    """Select the mount points below the cluster's folder, the deepest first."""
    below = [mount for mount in mounts if folder in (mount, *mount.parents)]
    return sorted(below, key=lambda mount: len(mount.parts), reverse=True)


def mount_points(mountinfo: str) -> list[Path]:
    """Return the mount points in the text of /proc/self/mountinfo."""
    return [Path(line.split()[4].encode().decode("unicode_escape")) for line in mountinfo.splitlines()]


def clean(layout: Layout, others: Iterable[str]) -> None:
    """Remove everything of the cluster, every process, interface, group, mount and file, but its empty folder.

    On a slow disk files are deleted in the background, elsewhere than in that folder.
    """
    folder = layout.folder
    wait_until(
        lambda: _no_process(folder), f"the end of cluster {layout.name}", timeout_s=GRACE_S, poll_s=0.05
    )
    remove_cable(layout)
    for mount in own_mounts(folder, mount_points(Path("/proc/self/mountinfo").read_text(encoding="utf-8"))):
        run(["umount", str(mount)])
    for name in own_groups(layout.name, cgroups.existing(f"stepkeeper-{layout.name}-"), others=others):
        wait_until(lambda name=name: not cgroups.remove(name), f"group {name} to be empty", timeout_s=GRACE_S)  # type: ignore[misc]
    discard(folder, folder.parent.with_name("discarded"), patience_s=PATIENCE_S)


def remove_cable(layout: Layout) -> None:
    """Remove the cluster's cable, unless it went by itself and what bears its name is another cluster's by now."""
    with state.lock(state.state_root()):
        others = (state.read_file(name) for name in state.names() if name != layout.name)
        if not any(
            other is not None and other.block == layout.block and state.is_running(other.name)
            for other in others
        ):
            network.disconnect(layout)


def discard(folder: Path, trash: Path, *, patience_s: float) -> None:
    """Empty a folder, below which nothing is mounted any more, and delete what was in it.

    What takes longer than `patience_s`, on a slow disk, is deleted in the background, in `trash`: a folder of the same
    file system. What an earlier deletion has left there goes too.
    """
    trash.mkdir(parents=True, exist_ok=True)
    # Collected here and moved at once: whatever is in the trash is whole, and any process may delete it.
    collected = Path(tempfile.mkdtemp(prefix="discarded-", dir=folder))
    for path in folder.iterdir():
        if path != collected:
            path.rename(collected / path.name)
    discarded = collected.rename(trash / collected.name)
    # A session of its own: neither Ctrl-C nor the end of this program ends it.
    remove: list[str | Path] = [
        "setsid",
        "--fork",
        "rm",
        "-rf",
        "--one-file-system",
        "--",
        *trash.glob("discarded-*"),
    ]
    none = subprocess.DEVNULL
    subprocess.run(remove, stdin=none, stdout=none, stderr=none, check=True)
    deadline = time.monotonic() + patience_s
    while discarded.exists():
        if time.monotonic() > deadline:
            say(f"the disk is slow: the files of {folder.name} are still being deleted, in the background")
            return
        time.sleep(0.05)


def _no_process(folder: Path) -> bool:
    kill_marked(CLUSTER_MARK, str(folder))
    return not any(marked(CLUSTER_MARK, str(folder)))
