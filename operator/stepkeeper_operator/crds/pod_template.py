"""Read the schema of a pod template from pod_template.yaml, a copy of the pinned JobSet's.

When another JobSet or Kubernetes version is pinned, regenerate that file from the CRD in JobSet's Go module:
``python -m stepkeeper_operator.crds.pod_template $(go list -m -f '{{.Dir}}' sigs.k8s.io/jobset)/charts/jobset/crds/*``
"""

import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

__all__ = ["pod_template_schema", "trim_pod_template"]

_FILE: Final = Path(__file__).with_name("pod_template.yaml")
_IN_JOBSET: Final = (
    "properties.spec.properties.replicatedJobs.items.properties.template.properties.spec.properties.template"
)
_MAX_CONTAINERS: Final = 32
_MAX_VARIABLES: Final = 512
_MAX_NAME: Final = 256
"""Bounds that the API server uses to estimate the cost of rules. With these, rules over env fit its budget."""


def pod_template_schema() -> dict[str, Any]:
    """Return the committed schema of spec.template."""
    schema: dict[str, Any] = yaml.safe_load(_FILE.read_text())
    return schema


def trim_pod_template(jobset_crd: Mapping[str, Any]) -> dict[str, Any]:
    """Cut the pod template's schema out of a CRD of JobSet.

    Descriptions, defaults, and fields of running pods are left out, so that client-side apply accepts the CRD. Lists
    and names get bounds for CEL.
    """
    schema: Any = jobset_crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for key in _IN_JOBSET.split("."):
        schema = schema[key]
    template: dict[str, Any] = _slim(schema)
    template["required"] = ["spec"]
    meta, spec = template["properties"]["metadata"], template["properties"]["spec"]
    meta["properties"] = {name: meta["properties"][name] for name in ("annotations", "labels")}
    del spec["properties"]["ephemeralContainers"]
    spec["properties"]["restartPolicy"]["maxLength"] = _MAX_NAME
    for kind in ("containers", "initContainers"):
        _bound_containers(spec["properties"][kind])
    return template


def _bound_containers(containers: dict[str, Any]) -> None:
    containers["maxItems"] = _MAX_CONTAINERS
    properties = containers["items"]["properties"]
    properties["name"]["maxLength"] = _MAX_NAME
    properties["env"]["maxItems"] = _MAX_VARIABLES
    properties["env"]["items"]["properties"]["name"]["maxLength"] = _MAX_NAME


def _slim(node: Any, keys: Collection[str] = ()) -> Any:
    """Copy the schema deeply, without descriptions, and without defaults except those of a list's `keys`.

    A default that a later schema adds would change the templates of existing jobs, and restart them.
    """
    if isinstance(node, list):
        return [_slim(item) for item in node]
    if not isinstance(node, dict):
        return node
    slim = {key: _slim(value) for key, value in node.items() if key not in {"description", "default"}}
    if "items" in node:
        slim["items"] = _slim(node["items"], node.get("x-kubernetes-list-map-keys", ()))
    if "properties" in node:
        # Its keys are names of fields: a field may be named description or default.
        slim["properties"] = {name: _slim(field) for name, field in node["properties"].items()}
    # The schema of a list is invalid if one of its keys is neither required nor has a default.
    for name in keys:
        if "default" in node["properties"][name]:
            slim["properties"][name]["default"] = node["properties"][name]["default"]
    return slim


def _main() -> None:
    crd = yaml.safe_load(Path(sys.argv[1]).read_text())
    _FILE.write_text(yaml.safe_dump(trim_pod_template(crd), sort_keys=True))


if __name__ == "__main__":
    _main()
