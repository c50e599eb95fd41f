"""Write the CRDs of the chart and the pages of the docs.

Run it in the root of the repository.
"""

import sys
from pathlib import Path
from typing import Final

import yaml

from stepkeeper_operator.crds.crd import build_crd
from stepkeeper_operator.crds.definition import ResourceDefinition
from stepkeeper_operator.crds.kinds import KINDS
from stepkeeper_operator.crds.pod_template import build_template_defaults, pod_template_schema
from stepkeeper_operator.crds.reference import build_reference

_HEADER: Final = (
    "# Made by `make generate` from operator/stepkeeper_operator/api; change the types, not this file.\n"
)
TEMPLATE_DEFAULTS_MODULE: Final = Path("operator/stepkeeper_operator/api/template_defaults.py")
CRDS: Final = Path("charts/stepkeeper/crds")


def main() -> int:
    """Write everything that is generated from the types. Return the exit status."""
    if not Path("pyproject.toml").is_file():
        sys.stderr.write("run this in the root of the repository: it writes into charts/ and docs/\n")
        return 2
    files = {TEMPLATE_DEFAULTS_MODULE: build_template_defaults(pod_template_schema())}
    for definition in KINDS:
        files |= generate(definition)
    for path, text in files.items():
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
