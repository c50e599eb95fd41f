"""Build the CRD of one kind from its definition."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from stepkeeper.version import __version__
from stepkeeper_operator.api.base import ApiModel
from stepkeeper_operator.api.cel import CelRule
from stepkeeper_operator.api.v1alpha1.trainingjob import GROUP, VERSION
from stepkeeper_operator.crds.schema import (
    Schema,
    add_rules,
    keep_unknown_fields,
    replace_at,
    structural_schema,
    without_defaults,
)

__all__ = ["Column", "ResourceDefinition", "build_crd"]

_DIGEST_ANNOTATION: Final = "stepkeeper.dev/crd-digest"
"""Lets the chart check whether the cluster's CRD is its own: Helm installs CRDs, but never upgrades them."""

_VERSION_ANNOTATION: Final = "stepkeeper.dev/crd-version"
"""Lets the chart of an older release accept a newer CRD, which has all its fields."""


class Column(NamedTuple):
    """A column that `kubectl get` prints."""

    name: str
    type: str
    path: str
    description: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceDefinition:
    """One kind of the API: its names, its types, its rules and its page."""

    kind: str
    short_names: tuple[str, ...]
    model: type[ApiModel]
    """The type of the whole object. Its docstring is the description of the kind."""

    columns: tuple[Column, ...]
    rules: tuple[CelRule, ...]
    edit: Callable[[Schema], Schema] | None = None
    """Replaces parts of the schema that can't come from the types."""

    opaque: frozenset[str] = frozenset()
    """Paths of fields that other projects define: their inner fields aren't documented here."""

    page: Path
    """Page of the docs that lists the fields."""

    note: str = ""
    """Follows the description of the kind on that page."""

    @property
    def full_name(self) -> str:
        """The name of the CRD."""
        return f"{self.kind.lower()}s.{GROUP}"


def build_crd(definition: ResourceDefinition) -> dict[str, Any]:
    """Build the CustomResourceDefinition for the API server. The same definition always gives the same one."""
    names = {
        "kind": definition.kind,
        "listKind": f"{definition.kind}List",
        "plural": f"{definition.kind.lower()}s",
        "singular": definition.kind.lower(),
        "shortNames": list(definition.short_names),
    }
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": [_column(column) for column in definition.columns],
        "schema": {"openAPIV3Schema": _build_schema(definition)},
    }
    spec = {"group": GROUP, "names": names, "scope": "Namespaced", "versions": [version]}
    digest = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": definition.full_name,
            "annotations": {_DIGEST_ANNOTATION: digest, _VERSION_ANNOTATION: __version__},
        },
        "spec": spec,
    }


def _column(column: Column) -> dict[str, str]:
    description = {"description": column.description} if column.description else {}
    return {"name": column.name, "type": column.type, "jsonPath": column.path} | description


def _build_schema(definition: ResourceDefinition) -> Schema:
    """Build the schema of the whole object."""
    schema = structural_schema(definition.model)
    for name in ("apiVersion", "kind"):
        schema = replace_at(schema, name, {"type": "string"})
    # The API server has its own schema for metadata, and rejects even a description here.
    schema["properties"]["metadata"] = {"type": "object"}
    schema = schema if definition.edit is None else definition.edit(schema)
    # An operator that is newer than the cluster's CRD writes status fields that the CRD doesn't have.
    status = keep_unknown_fields(without_defaults(schema["properties"]["status"]))
    schema = replace_at(schema, "status", status)
    schema["required"] = ["spec"]
    return add_rules(schema, definition.rules)
