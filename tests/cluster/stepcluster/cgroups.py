"""Control groups: one for each node, in every hierarchy that the machine has, version 1 or 2."""

import os
from collections.abc import Sequence
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def hierarchies(root: Path = ROOT) -> tuple[Path, ...]:
    """Return the folders below which groups can be made: one with version 2, one for each controller with version 1."""
    if (root / "cgroup.controllers").exists():
        return (root,)
    return tuple(sorted(path for path in root.iterdir() if path.is_dir() and not path.is_symlink()))


def create(name: str) -> None:
    """Create the group in every hierarchy; it may use what its parent may."""
    for parent in hierarchies():
        group = parent / name
        group.mkdir(exist_ok=True)
        for file in ("cpuset.cpus", "cpuset.mems"):
            # In version 1 a new cpuset is empty, and nothing can run in it.
            if (
                (parent / file).exists()
                and (group / file).exists()
                and not (group / file).read_text().strip()
            ):
                (group / file).write_text((parent / file).read_text())


def groups(name: str) -> list[Path]:
    """Return all folders of the group, those inside it before itself."""
    found: list[Path] = []
    for parent in hierarchies():
        for folder, _, _ in os.walk(parent / name, topdown=False):
            found.append(Path(folder))
    return found


def processes(name: str) -> set[int]:
    """Process ids of all that runs in the group or below."""
    return set().union(*(members(folder) for folder in groups(name)))


def members(folder: Path) -> set[int]:
    try:
        return {int(line) for line in (folder / "cgroup.procs").read_text(encoding="utf-8").split()}
    except (FileNotFoundError, OSError):
        # The group ended while we looked, or (version 2) is a threaded one that lists none.
        return set()


def remove(name: str) -> list[Path]:
    """Remove the group from every hierarchy, and return the folders that something still runs in."""
    left = []
    for folder in groups(name):
        try:
            folder.rmdir()
        except FileNotFoundError:
            continue
        except OSError:
            left.append(folder)
    return left


def find(name: str, container_id: str) -> list[Path]:
    return [folder for folder in groups(name) if folder.name == container_id]


def existing(prefix: str) -> Sequence[str]:
    """Return the names of the top groups that begin so."""
    return sorted(
        {path.name for parent in hierarchies() for path in parent.glob(f"{prefix}*") if path.is_dir()}
    )
