"""Writes the CRDs into crds/ and their copy into the chart. Run in the root of the repository."""

import sys
from pathlib import Path

import yaml

from stepkeeper_operator.crds.crd import training_job_crd

_HEADER = (
    "# Made by `make generate` from operator/stepkeeper_operator/api; change the types, not this file.\n"
)
_FOLDERS = (Path("crds"), Path("charts/stepkeeper/crds"))


def main() -> int:
    """Every CRD is in every folder. Returns the exit status."""
    if not Path("pyproject.toml").is_file():
        print("run this in the root of the repository: it writes into crds/ and charts/", file=sys.stderr)  # noqa: T201  # a command
        return 2
    crd = training_job_crd()
    text = _HEADER + yaml.safe_dump(crd, sort_keys=False, width=110, allow_unicode=True)
    for folder in _FOLDERS:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{crd['metadata']['name']}.yaml").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
