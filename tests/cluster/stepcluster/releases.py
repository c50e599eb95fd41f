"""Versions of the operator to install one after another: this tree, a release, and a made-up later release."""

import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[3]
NEXT: Final = "99.0.0"
"""Its release: newer than any of this tree."""

_SOURCES: Final = ("operator", "runtime", "planners", "charts", "pyproject.toml", "README.md", "LICENSE")
_API: Final = "operator/stepkeeper_operator/api/v1alpha1"
_JOBS: Final = "operator/stepkeeper_operator/training_jobs"
_COUNT: Final = 'Annotated[int, Field(ge=1)] = 5\n    """A field that this tree doesn\'t know."""\n\n'

_CHANGES: Final[Mapping[str, Mapping[str, str]]] = {
    f"{_API}/trainingjob.py": {
        # Two fields with defaults: one is in the hash of what replaces pods.
        "class RestartsSpec(SpecPart):\n": f"class RestartsSpec(SpecPart):\n    next_limit: {_COUNT}",
        "\n    count: Annotated[int, Field(ge=1, le=4096)]\n": (
            f"\n    next_spread: {_COUNT}    count: Annotated[int, Field(ge=1, le=4096)]\n"
        ),
        # A member of a union.
        '    union: ClassVar = ("every", "continuous", "auto")\n': (
            '    union: ClassVar = ("every", "continuous", "auto", "hourly")\n\n'
            '    hourly: ContinuousIntervalSpec | None = None\n    """Save every hour."""\n'
        ),
    },
    f"{_API}/rules.py": {"has(self.auto)].exists_one": "has(self.auto), has(self.hourly)].exists_one"},
    f"{_JOBS}/build/objects.py": {
        "checkpoint.interval.model_dump(exclude_none=True)": (
            '{"every": {"seconds": 3600}} if checkpoint.interval.hourly else '
            "checkpoint.interval.model_dump(exclude_none=True)"
        ),
    },
    # Two fields of the status, one in a part of it.
    f"{_API}/trainingjob_status.py": {
        "    queued_resource_name: Annotated[str, Field(max_length=63)] | None = None\n": (
            f"    next_racks: {_COUNT}"
            "    queued_resource_name: Annotated[str, Field(max_length=63)] | None = None\n"
        ),
        "    next_start_time: Timestamp | None = None\n": (
            f"    next_score: {_COUNT}    next_start_time: Timestamp | None = None\n"
        ),
    },
    "charts/stepkeeper/Chart.yaml": {"\nversion: ": f"\nversion: {NEXT} # after "},
}
"""What the next release changes: texts of files, each of which occurs there once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A version of the operator."""

    name: str
    """Tag of its image."""

    chart: Path
    wheel: Path | None = None
    """None: this tree's."""

    @property
    def crds(self) -> Path:
        return self.chart / "crds"


TREE: Final = Version(name="dev", chart=ROOT / "charts" / "stepkeeper")


def release(name: str, folder: Path) -> Version:
    """Unpack the chart of a frozen release into the folder."""
    frozen = ROOT / "tests" / "data" / "releases" / name
    with tarfile.open(frozen / f"stepkeeper-{name}.tgz") as archive:
        archive.extractall(folder, filter="data")
    return Version(name=name, chart=folder / "stepkeeper", wheel=next(frozen.glob("*.whl")))


def make_next(folder: Path) -> Version:
    """Make the next release in the folder: this tree with `_CHANGES`, its CRDs and its wheel."""
    change_tree(folder)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", f"--outdir={folder / 'dist'}"]
    subprocess.run([*build, folder], check=True, capture_output=True, timeout=300)
    wheel = next((folder / "dist").glob("*.whl"))
    return Version(name=NEXT, chart=folder / "charts" / "stepkeeper", wheel=wheel)


def change_tree(folder: Path) -> None:
    """Copy this tree into the folder, change the sources, and generate the CRDs from them."""
    for name in _SOURCES:
        source = ROOT / name
        if source.is_dir():
            skipped = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, folder / name, dirs_exist_ok=True, ignore=skipped)
        else:
            shutil.copy(source, folder / name)
    version = folder / "runtime/stepkeeper/version.py"
    version.write_text(f'"""State the version."""\n\n__version__ = "{NEXT}"\n', encoding="utf-8")
    for name, changes in _CHANGES.items():
        text = (folder / name).read_text(encoding="utf-8")
        for before, after in changes.items():
            assert text.count(before) == 1, f"{name} has {text.count(before)} times: {before}"
            text = text.replace(before, after)
        (folder / name).write_text(text, encoding="utf-8")
    path = f"{folder / 'operator'}:{folder / 'runtime'}"
    generate = [sys.executable, "-m", "stepkeeper_operator.crds"]
    subprocess.run(generate, cwd=folder, env={"PYTHONPATH": path}, check=True, timeout=120)
