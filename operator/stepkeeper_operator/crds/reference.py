"""Write the docs page that lists a resource's fields, from its CRD."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from stepkeeper_operator.api.v1alpha1.rules import RULES

__all__ = ["training_job_reference"]

_OPAQUE: Final = "spec.template"
"""A pod template. Kubernetes' own documentation describes its fields."""

_INTRODUCTION: Final = """\
# CheckpointedTrainingJob

<!-- Made by `make generate` from operator/stepkeeper_operator/api; change the types, not this file. -->

A training job that is started again from its latest committed checkpoint, whatever ends it. Short name: `ctj`.
`kubectl explain ctj.spec --recursive` says the same as this page. A field that isn't listed is refused.
"""


def training_job_reference(crd: Mapping[str, Any]) -> str:
    """Return the page in Markdown."""
    properties = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    parts = [_INTRODUCTION]
    for name in ("spec", "status"):
        parts += [f"## {name}", "", "| Field | Type | Default | |", "| --- | --- | --- | --- |"]
        parts += list(_rows(properties[name], name))
        parts.append("")
    parts += ["## Rules", "", "The API server refuses what breaks one of these, and says:", ""]
    parts += [f"- {rule.message}" for rule in RULES]
    return "\n".join(parts) + "\n"


def _rows(schema: Mapping[str, Any], path: str) -> Iterator[str]:
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        here = f"{path}.{name}"
        default = "required" if name in required and path.startswith("spec") else _default(field)
        yield f"| `{here}` | {_type(field)} | {default} | {field.get('description', '')} |"
        if here != _OPAQUE:
            yield from _rows(field, here)
            yield from _rows(field.get("items", {}), f"{here}[]")


def _type(field: Mapping[str, Any]) -> str:
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if field["type"] == "array":
        return f"list of {_type(field['items'])}, at most {field['maxItems']}"
    return "time" if field.get("format") == "date-time" else str(field["type"])


def _default(field: Mapping[str, Any]) -> str:
    value = field.get("default")
    if value in (None, []) or isinstance(value, Mapping):
        return ""
    return f"`{str(value).lower()}`" if isinstance(value, bool) else f"`{value}`"
