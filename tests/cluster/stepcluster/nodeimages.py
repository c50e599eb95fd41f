"""Know which images a node has, and import them into its containerd. Runs on the machine and inside the node."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from stepcluster.machine import write_json

KNOWN = "images.json"
"""In a node's folder: archives that the node is to have, also after it was wiped."""
IMPORTED = "containerd/imported.json"
"""Below containerd's own data, and so gone when these are wiped: archives that are in it."""


def ctr(folder: Path, *arguments: str) -> list[str]:
    return ["ctr", f"--address={folder / 'containerd.sock'}", "--namespace=k8s.io", *arguments]


def remember(folder: Path, archive: Path) -> None:
    """Add the archive to those that the node imports when it starts."""
    write_json(folder / KNOWN, sorted({*_read(folder / KNOWN), str(archive)}))


def known(folder: Path) -> tuple[Path, ...]:
    return tuple(Path(archive) for archive in _read(folder / KNOWN))


def import_missing(folder: Path, run: Callable[[Sequence[str]], object]) -> None:
    imported = _read(folder / IMPORTED)
    for archive in _read(folder / KNOWN):
        if archive not in imported:
            run(ctr(folder, "images", "import", "--snapshotter=overlayfs", archive))
            imported.append(archive)
            write_json(folder / IMPORTED, imported)


def _read(path: Path) -> list[str]:
    return [str(item) for item in json.loads(path.read_text(encoding="utf-8"))] if path.exists() else []
