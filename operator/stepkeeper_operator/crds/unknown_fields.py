"""Build the admission policy that refuses unknown fields and names the known ones.

Without it the API server drops such a field and tells only clients that ask for strict validation; it gives
the name and nothing more. CEL in the CRD can't see fields that the schema doesn't name. So the schema keeps
the unknown fields of our parts of spec, and this policy refuses them, whatever the client asks for. Those of
status are kept as well: in an upgrade, or after one was taken back, an operator is older or newer than its CRD.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from stepkeeper_operator.api.v1alpha1.trainingjob import GROUP, VERSION
from stepkeeper_operator.crds.definition import ResourceDefinition
from stepkeeper_operator.crds.schema import Schema

__all__ = ["keep_unknown_fields", "unknown_fields_manifests", "unknown_fields_policy"]

_KEEP: Final = "x-kubernetes-preserve-unknown-fields"
_ITEMS: Final = "[]"
"""Ends the path of a list's items."""


def keep_unknown_fields(schema: Schema, opaque: frozenset[str]) -> Schema:
    """Return the object's schema with unknown fields of spec and status kept, except at the `opaque` paths.

    An opaque field is a pod template: it has hundreds of fields, and the API server has its own message for
    unknown ones. Unknown fields of status come from an operator of another version. The API server refuses the
    whole of an apply with one field that the schema neither has nor keeps.
    """
    kept = {name: _keeping(schema["properties"][name], name, opaque) for name in ("spec", "status")}
    return {**schema, "properties": {**schema["properties"], **kept}}


def unknown_fields_policy(definition: ResourceDefinition, crd: Mapping[str, Any]) -> dict[str, Any]:
    """Build the spec of a ValidatingAdmissionPolicy for the kind with that CRD."""
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    parts = list(_parts(schema["properties"]["spec"], "spec", definition.opaque))
    places = _places(parts)
    return {
        "failurePolicy": "Fail",
        "matchConstraints": {
            "resourceRules": [
                {
                    "apiGroups": [GROUP],
                    "apiVersions": [VERSION],
                    "operations": ["CREATE", "UPDATE"],
                    "resources": [definition.plural],
                }
            ]
        },
        # Objects that are stored already can still be labelled, or deleted with their owner.
        "matchConditions": [
            {
                "name": "spec-changes",
                "expression": "request.operation == 'CREATE' || object.spec != oldObject.spec",
            }
        ],
        "variables": [{"name": _variable(path), "expression": _unknown(path, part)} for path, part in parts],
        "validations": [
            {
                "expression": f"size(variables.{_variable(path)}) == 0",
                "message": f"a field of {path} is unknown; its fields are {_listed(part)}",
                "messageExpression": _message(path, part, places),
            }
            for path, part in parts
        ],
    }


def unknown_fields_manifests(definition: ResourceDefinition, crd: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Build the policy and its binding, to be applied without the chart."""
    name = definition.policy_name
    head = {"apiVersion": "admissionregistration.k8s.io/v1", "metadata": {"name": name}}
    spec = unknown_fields_policy(definition, crd)
    policy = {**head, "kind": "ValidatingAdmissionPolicy", "spec": spec}
    binding = {**head, "kind": "ValidatingAdmissionPolicyBinding"}
    return [policy, {**binding, "spec": {"policyName": name, "validationActions": ["Deny"]}}]


def _keeping(part: Schema, path: str, opaque: frozenset[str]) -> Schema:
    if path in opaque:
        return part
    if "items" in part:
        return {**part, "items": _keeping(part["items"], path + _ITEMS, opaque)}
    if not _is_ours(part):
        return part
    fields = {name: _keeping(field, f"{path}.{name}", opaque) for name, field in _fields(part).items()}
    return {**part, **({"properties": fields} if fields else {}), _KEEP: True}


def _is_ours(part: Mapping[str, Any]) -> bool:
    """Return True for an object whose fields are defined, and False for a map and a plain value."""
    return part["type"] == "object" and "additionalProperties" not in part


def _fields(part: Mapping[str, Any]) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = part.get("properties", {})
    return fields


def _parts(
    part: Mapping[str, Any], path: str, opaque: frozenset[str]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield every object of ours with its path, outer ones first."""
    if path in opaque:
        return
    if "items" in part:
        yield from _parts(part["items"], path + _ITEMS, opaque)
    if not _is_ours(part):
        return
    yield path, part
    for name, field in _fields(part).items():
        yield from _parts(field, f"{path}.{name}", opaque)


def _places(parts: list[tuple[str, Mapping[str, Any]]]) -> dict[str, str]:
    """Map each field name to the paths where a field of that name exists."""
    places: dict[str, list[str]] = {}
    for path, part in parts:
        for name in _fields(part):
            places.setdefault(name, []).append(f"{path}.{name}")
    return {name: " or ".join(paths) for name, paths in places.items()}


def _variable(path: str) -> str:
    return path.removesuffix(_ITEMS).replace(".", "_")


def _unknown(path: str, part: Mapping[str, Any]) -> str:
    """Write CEL for the unknown names at `path`; for items, for a list of such names for each item with any."""
    known = ", ".join(f"'{name}'" for name in _fields(part))
    optional = "".join(f".?{name}" for name in path.removesuffix(_ITEMS).split("."))
    unknown = f"filter(name, !(name in [{known}]))"
    if path.endswith(_ITEMS):
        return f"dyn(object){optional}.orValue([]).map(item, item.{unknown}).filter(names, size(names) > 0)"
    return f"dyn(object){optional}.orValue({{}}).{unknown}"


def _message(path: str, part: Mapping[str, Any], places: Mapping[str, str]) -> str:
    first = f"variables.{_variable(path)}[0]" + ("[0]" if path.endswith(_ITEMS) else "")
    elsewhere = ", ".join(
        f"'{name}': '{at}'" for name, at in places.items() if name not in _fields(part)
    )
    hint = f"{{{elsewhere}}}[?{first}].optMap(at, ': write it as ' + at).orValue('')"
    return f"'unknown field {path}.' + {first} + {hint} + '; the fields of {path} are {_listed(part)}'"


def _listed(part: Mapping[str, Any]) -> str:
    """List the names of the fields, with those of the next level in braces."""
    names = (
        f"{name} {{{', '.join(_fields(field))}}}" if _is_ours(field) else name
        for name, field in _fields(part).items()
    )
    return ", ".join(names) or "none"
