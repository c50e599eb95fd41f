"""Write the docs page that lists the fields of a kind, from its CRD."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from stepkeeper_operator.crds.crd import ResourceDefinition

__all__ = ["build_reference"]

_INTRODUCTION: Final = """\
# {kind}

<!-- Made by `make generate` from operator/stepkeeper_operator/api; change the types, not this file. -->

{introduction} Short name: `{short}`.
`kubectl explain {short}.spec --recursive` shows the same descriptions.
"""


def build_reference(definition: ResourceDefinition, crd: Mapping[str, Any]) -> str:
    """Return the page in Markdown."""
    properties = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    introduction = f"{definition.model.__doc__}{definition.note}"
    kind, short = definition.kind, definition.short_names[0]
    parts = [_INTRODUCTION.format(kind=kind, introduction=introduction, short=short)]
    for name in ("spec", "status"):
        parts += [f"## {name}", "", "| Field | Type | Default | |", "| --- | --- | --- | --- |"]
        parts += list(_rows(properties[name], name, definition.opaque))
        parts.append("")
    text = "The API server rejects an object that breaks one of these, with the message:"
    parts += ["## Rules", "", text, ""]
    parts += [f"- {_escaped(rule.message)}" for rule in definition.rules]
    return "\n".join(parts) + "\n"


def _escaped(text: str) -> str:
    """Escape the <placeholders> in the text: Markdown would treat them as HTML."""
    return text.replace("<", "&lt;")


def _rows(schema: Mapping[str, Any], path: str, opaque: frozenset[str]) -> Iterator[str]:
    """Yield a row for each field at or below `path`. A schema that isn't an object's has no properties."""
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        here = f"{path}.{name}"
        # The operator writes the status: which of its fields are required is of no use to readers.
        default = "required" if name in required and path.startswith("spec") else _default(field)
        yield f"| `{here}` | {_type(field)} | {default} | {_escaped(field.get('description', ''))} |"
        if here not in opaque:
            yield from _rows(field, here, opaque)
            yield from _rows(field.get("items", {}), f"{here}[]", opaque)


def _type(field: Mapping[str, Any]) -> str:
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if field["type"] == "array":
        return f"list of {_type(field['items'])}, at most {field['maxItems']}"
    if "additionalProperties" in field:
        return f"map of {_type(field['additionalProperties'])}, at most {field['maxProperties']}"
    return "time" if field.get("format") == "date-time" else str(field["type"])


def _default(field: Mapping[str, Any]) -> str:
    value = field.get("default")
    if value in (None, []) or isinstance(value, Mapping):  # an object's fields have their own rows
        return ""
    return f"`{str(value).lower()}`" if isinstance(value, bool) else f"`{value}`"
