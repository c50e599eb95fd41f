"""Convert pydantic's JSON schema to the structural schema of a CRD."""

from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias

from pydantic import BaseModel

from stepkeeper_operator.api.cel import CelRule
from stepkeeper_operator.errors import GenerationError

__all__ = [
    "Schema",
    "add_rules",
    "keep_unknown_fields",
    "replace_at",
    "structural_schema",
    "without_defaults",
]

Schema: TypeAlias = dict[str, Any]

_KEPT_KEYWORDS: Final = (
    "description",
    "type",
    "format",
    "enum",
    "default",
    "pattern",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "required",
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
)
"""The keywords that are kept, in the order of the output."""


def structural_schema(model: type[BaseModel]) -> Schema:
    """Return the structural schema of `model`.

    References are resolved, optional fields have no null, and integers have 64 bits.

    Raises:
        GenerationError: A type has no structural schema: a float, a union, a tuple of fixed length.
    """
    raw = model.model_json_schema(by_alias=True)
    return _convert(raw, raw.get("$defs", {}), model.__name__)


def _convert(node: Mapping[str, Any], defs: Mapping[str, Any], path: str) -> Schema:
    node = _resolve(node, defs, path)
    kind = node.get("type")
    if kind not in ("object", "array", "string", "integer", "boolean"):
        raise GenerationError(
            f"{path}: a CRD can't have {kind or 'a union'}; use integers, strings or objects"
        )
    result: Schema = {key: node[key] for key in _KEPT_KEYWORDS if key in node}
    if "description" in result:
        result["description"] = " ".join(result["description"].split())
    if kind == "integer":
        result["format"] = "int64"
    if kind == "array":
        result["items"] = _convert(node["items"], defs, f"{path}[]")
        result.setdefault("x-kubernetes-list-type", "atomic")
    if kind == "object":
        _convert_object(node, defs, path, result)
    return result


def _convert_object(node: Mapping[str, Any], defs: Mapping[str, Any], path: str, result: Schema) -> None:
    if isinstance(extra := node.get("additionalProperties"), Mapping):
        result["additionalProperties"] = _convert(extra, defs, f"{path}{{}}")
    # Leave out empty properties: the API server drops them, and each later apply would show a change.
    if properties := node.get("properties"):
        result["properties"] = {name: _convert(p, defs, f"{path}.{name}") for name, p in properties.items()}
    if "default" in result:
        # Write out the fields' defaults: the API server checks the rules on this default before it adds them.
        fields = result.get("properties", {})  # absent for an object without fields
        result["default"] = {name: field["default"] for name, field in fields.items() if "default" in field}


def _resolve(node: Mapping[str, Any], defs: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """Replace a reference, or a union with null, by the type itself. Keywords beside it take precedence."""
    beside = {key: value for key, value in node.items() if key not in ("$ref", "anyOf")}
    if beside.get("default", ...) is None:  # the default of an optional field
        del beside["default"]
    if "$ref" in node:
        return _resolve({**defs[node["$ref"].rpartition("/")[2]], **beside}, defs, path)
    if "anyOf" not in node:
        return beside
    options = [option for option in node["anyOf"] if option.get("type") != "null"]
    if len(options) != 1:
        raise GenerationError(
            f"{path}: a union of {len(options)} types has no structural schema; use one type"
        )
    return _resolve({**options[0], **beside}, defs, path)


def without_defaults(schema: Schema) -> Schema:
    """Return `schema` without defaults, so that unwritten fields stay absent."""
    result = {key: value for key, value in schema.items() if key != "default"}
    if "items" in result:
        result["items"] = without_defaults(result["items"])
    if "properties" in result:
        result["properties"] = {name: without_defaults(p) for name, p in result["properties"].items()}
    return result


def keep_unknown_fields(schema: Schema) -> Schema:
    """Return `schema` with unknown fields preserved at every depth, except within maps.

    The API server rejects a whole apply for one field that the schema neither has nor preserves.
    """
    if "items" in schema:
        return {**schema, "items": keep_unknown_fields(schema["items"])}
    if schema["type"] != "object" or "additionalProperties" in schema:
        return schema
    fields = {name: keep_unknown_fields(field) for name, field in schema["properties"].items()}
    return {**schema, "properties": fields, "x-kubernetes-preserve-unknown-fields": True}


def replace_at(schema: Schema, path: str, new: Schema) -> Schema:
    """Replace the field at `path`, except its description, by `new`. Raises GenerationError if there is none."""
    if not path:
        kept = {"description": schema["description"]} if "description" in schema else {}
        return kept | new
    head, _, rest = path.partition(".")
    properties = schema.get("properties", {})  # absent if nothing can be below this field
    if head not in properties:
        raise GenerationError(f"no field {head!r} in the schema; known: {', '.join(properties)}")
    return {**schema, "properties": {**properties, head: replace_at(properties[head], rest, new)}}


def add_rules(schema: Schema, rules: Iterable[CelRule]) -> Schema:
    """Return `schema` with each rule added at its field. Raises GenerationError if there is no such field."""
    for rule in rules:
        found = schema
        for name in rule.at.split(".") if rule.at else ():
            found = found.get("properties", {}).get(name, {})  # if it is absent, `replace_at` raises
        entry = {"rule": rule.cel, "message": rule.message}
        with_rule = {**found, "x-kubernetes-validations": [*found.get("x-kubernetes-validations", []), entry]}
        schema = replace_at(schema, rule.at, with_rule)
    return schema
