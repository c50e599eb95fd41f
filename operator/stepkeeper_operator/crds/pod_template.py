"""Read the schema of a pod template, which is a copy of the pinned JobSet's, from pod_template.yaml; list its defaults.

When another JobSet or Kubernetes is pinned, write that file again from the CRD in JobSet's Go module:
``python -m stepkeeper_operator.crds.pod_template $(go list -m -f '{{.Dir}}' sigs.k8s.io/jobset)/charts/jobset/crds/*``
"""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

__all__ = ["build_template_defaults", "find_defaults", "pod_template_schema", "trim_pod_template"]

_FILE: Final = Path(__file__).with_name("pod_template.yaml")
_IN_JOBSET: Final = (
    "properties.spec.properties.replicatedJobs.items.properties.template.properties.spec.properties.template"
)
_MAX_CONTAINERS: Final = 32
_MAX_VARIABLES: Final = 512
_MAX_NAME: Final = 256
"""Bounds from which the API server estimates the cost of rules. Rules over env fit its budget up to these."""


_DEFAULTS_HEAD: Final = '''\
"""List the defaults that the API server puts into spec.template, by path; "[]" is any item of a list.

Made by `make generate` from crds/pod_template.yaml.
"""

from collections.abc import Mapping
from typing import Final

__all__ = ["TEMPLATE_DEFAULTS"]

TEMPLATE_DEFAULTS: Final[Mapping[str, str | int | bool]] = {
'''


def pod_template_schema() -> dict[str, Any]:
    """Return the committed schema of spec.template."""
    schema: dict[str, Any] = yaml.safe_load(_FILE.read_text())
    return schema


def trim_pod_template(jobset_crd: Mapping[str, Any]) -> dict[str, Any]:
    """Cut the pod template's schema out of a CRD of JobSet.

    Descriptions, and fields that only a running pod can have, are left out: it is small enough for client-side
    apply. Lists and names get bounds for CEL.
    """
    schema: Any = jobset_crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for key in _IN_JOBSET.split("."):
        schema = schema[key]
    template: dict[str, Any] = _without_descriptions(schema)
    template["required"] = ["spec"]
    meta, spec = template["properties"]["metadata"], template["properties"]["spec"]
    meta["properties"] = {name: meta["properties"][name] for name in ("annotations", "labels")}
    del spec["properties"]["ephemeralContainers"]
    spec["properties"]["restartPolicy"]["maxLength"] = _MAX_NAME
    for kind in ("containers", "initContainers"):
        _bound_containers(spec["properties"][kind])
    return template


def build_template_defaults(schema: Mapping[str, Any]) -> str:
    """Build the text of the module that lists the defaults of the schema, so that the operator needn't read that."""
    lines = (f"    {json.dumps(path)}: {_render(value)},\n" for path, value in sorted(find_defaults(schema)))
    return _DEFAULTS_HEAD + "".join(lines) + "}\n"


def find_defaults(schema: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str | int | bool]]:
    """Yield the path of each field with a default, and the default."""
    for name, field in schema.get("properties", {}).items():
        below = f"{path}.{name}" if path else name
        if "default" in field:
            yield below, field["default"]
        yield from find_defaults(field, below)
    if "items" in schema:
        yield from find_defaults(schema["items"], f"{path}[]")


def _bound_containers(containers: dict[str, Any]) -> None:
    containers["maxItems"] = _MAX_CONTAINERS
    properties = containers["items"]["properties"]
    properties["name"]["maxLength"] = _MAX_NAME
    properties["env"]["maxItems"] = _MAX_VARIABLES
    properties["env"]["items"]["properties"]["name"]["maxLength"] = _MAX_NAME


def _without_descriptions(node: Any) -> Any:
    """Copy the schema deeply without the keyword `description`. A field may have that name, and stays."""
    if isinstance(node, list):
        return [_without_descriptions(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: {name: _without_descriptions(field) for name, field in value.items()}
        if key == "properties"
        else _without_descriptions(value)
        for key, value in node.items()
        if key != "description"
    }


def _render(value: str | int | bool) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _main() -> None:
    crd = yaml.safe_load(Path(sys.argv[1]).read_text())
    _FILE.write_text(yaml.safe_dump(trim_pod_template(crd), sort_keys=True))


if __name__ == "__main__":
    _main()
