"""Writes the CRD, its copy in the chart and its page in the docs. Run in the root of the repository."""

import sys
from pathlib import Path
from typing import Final

import yaml

from stepkeeper_operator.crds.crd import training_job_crd
from stepkeeper_operator.crds.reference import training_job_reference

_HEADER: Final = (
    "# Made by `make generate` from operator/stepkeeper_operator/api; change the types, not this file.\n"
)
_FOLDERS: Final = (Path("crds"), Path("charts/stepkeeper/crds"))
_REFERENCE: Final = Path("docs/user/job-reference.md")


def main() -> int:
    """Everything that is made from the types is written. Returns the exit status."""
    if not Path("pyproject.toml").is_file():
        sys.stderr.write("run this in the root of the repository: it writes into crds/, charts/ and docs/\n")
        return 2
    crd = training_job_crd()
    text = _HEADER + yaml.safe_dump(crd, sort_keys=False, width=110, allow_unicode=True)
    for folder in _FOLDERS:
        _write(folder / f"{crd['metadata']['name']}.yaml", text)
    _write(_REFERENCE, training_job_reference(crd))
    return 0


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
