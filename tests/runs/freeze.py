"""Freeze the wheel and the chart of this tree as a release: python tests/runs/freeze.py.

Tests compare each later tree with tests/data/releases, so a folder in it is never changed. After a freeze, raise the
version in runtime/stepkeeper/version.py and charts/stepkeeper/Chart.yaml, run `make generate`, and copy the release's
folder of tests/data/wire for the new version.
"""

import gzip
import hashlib
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Final

from stepkeeper.version import __version__

ROOT: Final = Path(__file__).parents[2]
RELEASES: Final = ROOT / "tests" / "data" / "releases"


def freeze(folder: Path) -> None:
    """Write the wheel, the chart as `helm package` lays it out, and the checksums of both into the folder."""
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)
    _package_chart(folder / f"stepkeeper-{__version__}.tgz")
    sums = [
        f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in sorted(folder.iterdir())
    ]
    (folder / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")


def _package_chart(target: Path) -> None:
    chart = ROOT / "charts"
    with (
        target.open("wb") as file,
        gzip.GzipFile(fileobj=file, mode="wb", filename="", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for source in sorted(path for path in chart.rglob("*") if path.is_file()):
            entry = tarfile.TarInfo(source.relative_to(chart).as_posix())
            entry.size, entry.mode = source.stat().st_size, 0o644
            with source.open("rb") as content:
                archive.addfile(entry, content)


if __name__ == "__main__":
    freeze(RELEASES / __version__)
