"""Write the CRDs of the chart and the pages of the docs.

Run it in the root of the repository.
"""

import sys
from pathlib import Path
from typing import Final

import yaml

from stepkeeper_operator.crds.crd import ResourceDefinition, build_crd
from stepkeeper_operator.crds.kinds import KINDS
from stepkeeper_operator.crds.reference import build_reference

_HEADER: Final = (
    "# Made by `make generate` from operator/stepkeeper_operator/api; change the types, not this file.\n"
)
CRDS: Final = Path("charts/stepkeeper/crds")


def main() -> int:
    """Write all files that are generated from the types. Return the exit status."""
    if not Path("pyproject.toml").is_file():
        sys.stderr.write("run this in the root of the repository: it writes into charts/ and docs/\n")
        return 2
    files = [file for definition in KINDS for file in generate(definition).items()]
    for path, text in files:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return 0


def generate(definition: ResourceDefinition) -> dict[Path, str]:
    """Return the files of one kind, by their paths from the root of the repository."""
    crd = build_crd(definition)
    return {
        CRDS / f"{definition.full_name}.yaml": _HEADER
        + yaml.safe_dump(crd, sort_keys=False, width=110, allow_unicode=True),
        definition.page: build_reference(definition, crd),
    }


if __name__ == "__main__":
    sys.exit(main())
