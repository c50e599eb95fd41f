"""Build the CRD of CheckpointedTrainingJob from its types, its rules and JobSet's pod template."""

from typing import Any, Final

from stepkeeper_operator.api.v1alpha1 import trainingjob as api
from stepkeeper_operator.api.v1alpha1.rules import RULES
from stepkeeper_operator.crds.pod_template import pod_template_schema
from stepkeeper_operator.crds.schema import Schema, add_rules, replace_at, structural_schema, without_defaults
from stepkeeper_operator.crds.unknown_fields import keep_unknown_fields

__all__ = ["training_job_crd", "training_job_schema"]

_COLUMNS: Final = (
    ("Phase", "string", ".status.phase", "One word for the conditions."),
    ("Step", "integer", ".status.progress.step", "Last finished step."),
    ("Committed", "integer", ".status.checkpoint.latest.step", "Step that the next attempt resumes from."),
    ("Restarts", "integer", ".status.restarts.total", "Restarts of the job, whatever the cause."),
    ("Age", "date", ".metadata.creationTimestamp", ""),
)


def training_job_crd() -> dict[str, Any]:
    """Build the CustomResourceDefinition for the API server. Each call returns the same."""
    names = {
        "kind": api.KIND,
        "listKind": f"{api.KIND}List",
        "plural": api.PLURAL,
        "singular": api.SINGULAR,
        "shortNames": list(api.SHORT_NAMES),
    }
    version = {
        "name": api.VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": [_column(*column) for column in _COLUMNS],
        "schema": {"openAPIV3Schema": training_job_schema()},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{api.PLURAL}.{api.GROUP}"},
        "spec": {"group": api.GROUP, "names": names, "scope": "Namespaced", "versions": [version]},
    }


def _column(name: str, kind: str, path: str, description: str) -> dict[str, str]:
    column = {"name": name, "type": kind, "jsonPath": path}
    return column | ({"description": description} if description else {})


def training_job_schema() -> Schema:
    """Build the schema of the whole resource."""
    schema = structural_schema(api.CheckpointedTrainingJob)
    for name in ("apiVersion", "kind"):
        schema = replace_at(schema, name, {"type": "string"})
    # The API server has a schema of its own for metadata and refuses so much as a description here.
    schema["properties"]["metadata"] = {"type": "object"}
    schema = replace_at(schema, "spec.template", pod_template_schema())
    schema = replace_at(schema, "status", without_defaults(schema["properties"]["status"]))
    schema["required"] = ["spec"]
    return keep_unknown_fields(add_rules(schema, RULES))
