"""Keep the record of a running cluster, and lock it against other processes."""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from stepcluster.errors import NoClusterError
from stepcluster.layout import Layout
from stepcluster.machine import write_json
from stepcluster.nodes import Node
from stepcluster.processes import CLUSTER_MARK, first_process

FILE = "cluster.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    name: str
    block: int
    nodes: tuple[Node, ...]
    torch_folder: str
    """Folder of the machine that pods find at one path on every node."""

    def layout(self) -> Layout:
        return Layout(name=self.name, block=self.block, folder=cluster_folder(self.name))


def state_root() -> Path:
    """Return the folder of all clusters: $XDG_STATE_HOME/stepkeeper, by default /var/tmp/stepkeeper."""
    return Path(os.environ.get("XDG_STATE_HOME") or "/var/tmp") / "stepkeeper" / "clusters"


def cluster_folder(name: str) -> Path:
    return state_root() / name


def write(record: Record) -> None:
    write_json(cluster_folder(record.name) / FILE, asdict(record))


def read(name: str) -> Record:
    record = read_file(name)
    if record is None or not is_running(name):
        raise NoClusterError(
            f"no cluster {name!r} is running: `python -m stepcluster up --name {name}` starts it"
        )
    return record


def read_file(name: str) -> Record | None:
    """Read the record of a cluster, running or not; None if there is none."""
    path = cluster_folder(name) / FILE
    if not path.exists():
        return None
    values = json.loads(path.read_text(encoding="utf-8"))
    nodes = tuple(Node(**node) for node in values.pop("nodes"))
    return Record(**values, nodes=nodes)


def is_running(name: str) -> bool:
    return first_process(CLUSTER_MARK, str(cluster_folder(name))) is not None


def names() -> list[str]:
    """Return the names of all clusters that have a folder, running or crashed."""
    root = state_root()
    return sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Lock this folder, which is created if need be, against other processes for the block.

    The folder may be deleted inside the block: a process that waited for it then makes and locks a new one.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(handle, fcntl.LOCK_EX)
        if folder.exists() and os.path.samestat(os.fstat(handle), folder.stat()):
            break
        os.close(handle)
    try:
        yield
    finally:
        os.close(handle)
