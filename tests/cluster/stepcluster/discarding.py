"""Delete many files without keeping anybody waiting for a slow disk."""

import subprocess
import tempfile
import time
from pathlib import Path

from stepcluster.machine import say

PREFIX = "discarded-"
POLL_S = 0.05


def discard(folder: Path, trash: Path, *, patience_s: float) -> None:
    """Empty a folder, and delete what was in it.

    Args:
        folder: Nothing is mounted below it any more.
        trash: A folder of the same file system, for what is being deleted. What an earlier deletion left goes too.
        patience_s: Longest wait for the deletion, which then goes on in a process of its own.
    """
    trash.mkdir(parents=True, exist_ok=True)
    # Collected here and moved at once: whatever is in the trash is whole, and may be deleted by anybody.
    collected = Path(tempfile.mkdtemp(prefix=PREFIX, dir=folder))
    for path in folder.iterdir():
        if path != collected:
            path.rename(collected / path.name)
    discarded = collected.rename(trash / collected.name)
    # A session of its own: neither Ctrl-C nor the end of this program ends it.
    subprocess.run(
        ["setsid", "--fork", "rm", "-rf", "--one-file-system", "--", *trash.glob(f"{PREFIX}*")],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    deadline = time.monotonic() + patience_s
    while discarded.exists():
        if time.monotonic() > deadline:
            say(f"the disk is slow: the files of {folder.name} are still being deleted, in the background")
            return
        time.sleep(POLL_S)
