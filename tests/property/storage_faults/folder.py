"""A job on a small file system of its own, as a user who may do little; and what a test does to that file system."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

JOB: Final = Path(__file__).parent / "job.py"
NOBODY: Final = "65534"
PAGE_BYTES: Final = 4096
MOUNT_BYTES: Final = 4 * 1024 * 1024


class Folder:
    """A small file system that only the job sees; this process, which is root, looks at it through the job's root."""

    def __init__(self, process: "subprocess.Popen[str]", mount: Path) -> None:
        self._process = process
        self.mount = mount
        self.path = Path(f"/proc/{process.pid}/root{mount}")
        self.root = self.path / "run"
        self.uri = (mount / "run").as_uri()
        self._ballast = self.path / "ballast"

    def ask(self, *order: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the job ended with {self._process.wait()}"
        said: dict[str, Any] = json.loads(line)
        return said

    def save(self, step: int) -> dict[str, Any]:
        return self.ask("save", step)

    def check(self, steps: list[int]) -> dict[str, Any]:
        return self.ask("check", steps)

    def contents(self) -> dict[str, str]:
        files = (path for path in self.root.rglob("*") if path.is_file())
        return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    def fill(self, free_pages: int) -> None:
        """So many pages are free, and no more."""
        with self._ballast.open("wb", buffering=0) as file:
            pages = self._free_pages() - free_pages
            assert pages >= 0
            file.write(b"x" * (pages * PAGE_BYTES))
        assert self._free_pages() == free_pages

    def empty(self) -> None:
        self._ballast.unlink()

    def take_names(self) -> None:
        """No file can be made any more."""
        for number in range(os.statvfs(self.path).f_favail):
            (self.path / f"name-{number}").touch()

    def give_names(self) -> None:
        for path in self.path.glob("name-*"):
            path.unlink()

    def remount(self, mode: str) -> None:
        pid = str(self._process.pid)
        subprocess.run(
            ["nsenter", "-t", pid, "-m", "mount", "-o", f"remount,{mode}", str(self.mount)], check=True
        )

    def _free_pages(self) -> int:
        return os.statvfs(self.path).f_bfree


@contextmanager
def job_on_tmpfs(mount: Path) -> Iterator[Folder]:
    """A job on a file system of its own, as a user who may write there and nowhere else.

    The user may look into all folders: Python itself may be in one of root's.
    """
    mount.mkdir()
    options = f"size={MOUNT_BYTES},nr_inodes=300,mode=0777"
    inside = (
        f"mount -t tmpfs -o {options} tmpfs {mount} && exec setpriv --reuid {NOBODY} --regid {NOBODY} --clear-groups "
        f"--bounding-set -all,+dac_read_search --inh-caps -all,+dac_read_search --ambient-caps +dac_read_search "
        f"--no-new-privs {sys.executable} {JOB}"
    )
    environment = os.environ | {"HOME": str(mount), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", inside],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        yield Folder(process, mount)
    finally:
        process.communicate(timeout=60)
