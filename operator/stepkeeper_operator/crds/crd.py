"""Build the CRD of a kind from its types, its rules and its columns."""

import hashlib
import json
from typing import Any, Final

from stepkeeper_operator.api.v1alpha1.trainingjob import GROUP, VERSION
from stepkeeper_operator.crds.definition import Column, ResourceDefinition
from stepkeeper_operator.crds.schema import (
    Schema,
    add_rules,
    keep_unknown_fields,
    replace_at,
    structural_schema,
    without_defaults,
)

__all__ = ["build_crd", "build_schema"]

_DIGEST_ANNOTATION: Final = "stepkeeper.dev/crd-digest"
"""Tells the chart whether the CRD in the cluster is its own: Helm installs CRDs, and upgrades none."""


def build_crd(definition: ResourceDefinition) -> dict[str, Any]:
    """Build the CustomResourceDefinition for the API server. Each call returns the same."""
    names = {
        "kind": definition.kind,
        "listKind": f"{definition.kind}List",
        "plural": definition.plural,
        "singular": definition.singular,
        "shortNames": list(definition.short_names),
    }
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": [_column(column) for column in definition.columns],
        "schema": {"openAPIV3Schema": build_schema(definition)},
    }
    spec = {"group": GROUP, "names": names, "scope": "Namespaced", "versions": [version]}
    digest = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": definition.full_name, "annotations": {_DIGEST_ANNOTATION: digest}},
        "spec": spec,
    }


def _column(column: Column) -> dict[str, str]:
    told = {"description": column.description} if column.description else {}
    return {"name": column.name, "type": column.type, "jsonPath": column.path} | told


def build_schema(definition: ResourceDefinition) -> Schema:
    """Build the schema of the whole object."""
    schema = structural_schema(definition.model)
    for name in ("apiVersion", "kind"):
        schema = replace_at(schema, name, {"type": "string"})
    # The API server has a schema of its own for metadata and refuses so much as a description here.
    schema["properties"]["metadata"] = {"type": "object"}
    schema = definition.edit(schema)
    # An operator that is newer than its CRD writes fields of status that the CRD doesn't have.
    status = keep_unknown_fields(without_defaults(schema["properties"]["status"]))
    schema = replace_at(schema, "status", status)
    schema["required"] = ["spec"]
    return add_rules(schema, definition.rules)
