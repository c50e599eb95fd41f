"""Write the CRD, its admission policy, the chart's copies and the page of the docs.

Run it in the root of the repository.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from stepkeeper_operator.crds.crd import training_job_crd, training_job_schema
from stepkeeper_operator.crds.reference import training_job_reference
from stepkeeper_operator.crds.unknown_fields import (
    POLICY_NAME,
    unknown_fields_manifests,
    unknown_fields_policy,
)

_HEADER: Final = (
    "# Made by `make generate` from operator/stepkeeper_operator/api; change the types, not this file.\n"
)
_FOLDERS: Final = (Path("crds"), Path("charts/stepkeeper/crds"))
_POLICY: Final = Path("crds") / f"{POLICY_NAME}.yaml"
_POLICY_OF_CHART: Final = Path("charts/stepkeeper/files/unknown-fields.yaml")
"""The chart renders this file as a template: Helm never upgrades what a chart has in its crds folder."""

_REFERENCE: Final = Path("docs/user/job-reference.md")


def main() -> int:
    """Write everything that is generated from the types. Return the exit status."""
    if not Path("pyproject.toml").is_file():
        sys.stderr.write("run this in the root of the repository: it writes into crds/, charts/ and docs/\n")
        return 2
    crd = training_job_crd()
    for folder in _FOLDERS:
        _write(folder / f"{crd['metadata']['name']}.yaml", _HEADER + _yaml(crd))
    schema = training_job_schema()
    _write(_POLICY, _HEADER + "---\n".join(map(_yaml, unknown_fields_manifests(schema))))
    _write(_POLICY_OF_CHART, _HEADER + _yaml(unknown_fields_policy(schema)))
    _write(_REFERENCE, training_job_reference(crd))
    return 0


def _yaml(value: Mapping[str, Any]) -> str:
    return yaml.safe_dump(value, sort_keys=False, width=110, allow_unicode=True)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
