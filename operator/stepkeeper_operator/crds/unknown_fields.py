"""Build the admission policy that refuses unknown fields and names the known ones.

Without it the API server drops such a field and tells only clients that ask for strict validation; it gives
the name and nothing more. CEL in the CRD can't see fields that the schema doesn't name. So the schema keeps
the unknown fields of our parts of spec, and this policy refuses them, whatever the client asks for.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from stepkeeper_operator.api.v1alpha1 import trainingjob as api
from stepkeeper_operator.crds.schema import Schema

__all__ = ["POLICY_NAME", "keep_unknown_fields", "unknown_fields_manifests", "unknown_fields_policy"]

POLICY_NAME: Final = f"unknown-fields.{api.PLURAL}.{api.GROUP}"
_KEEP: Final = "x-kubernetes-preserve-unknown-fields"
_OPAQUE: Final = "spec.template"
"""A pod template has hundreds of fields, and the API server has its own message for unknown ones."""


def keep_unknown_fields(schema: Schema) -> Schema:
    """Return the resource's schema with unknown fields of spec kept, except in the pod template."""
    spec = _keeping(schema["properties"]["spec"], "spec")
    return {**schema, "properties": {**schema["properties"], "spec": spec}}


def unknown_fields_policy(schema: Schema) -> dict[str, Any]:
    """Build the spec of a ValidatingAdmissionPolicy for the resource with that schema."""
    parts = list(_parts(schema["properties"]["spec"], "spec"))
    places = _places(parts)
    return {
        "failurePolicy": "Fail",
        "matchConstraints": {
            "resourceRules": [
                {
                    "apiGroups": [api.GROUP],
                    "apiVersions": [api.VERSION],
                    "operations": ["CREATE", "UPDATE"],
                    "resources": [api.PLURAL],
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


def unknown_fields_manifests(schema: Schema) -> list[dict[str, Any]]:
    """Build the policy and its binding, to be applied without the chart."""
    head = {"apiVersion": "admissionregistration.k8s.io/v1", "metadata": {"name": POLICY_NAME}}
    policy = {**head, "kind": "ValidatingAdmissionPolicy", "spec": unknown_fields_policy(schema)}
    binding = {**head, "kind": "ValidatingAdmissionPolicyBinding"}
    return [policy, {**binding, "spec": {"policyName": POLICY_NAME, "validationActions": ["Deny"]}}]


def _keeping(part: Schema, path: str) -> Schema:
    if path == _OPAQUE or "properties" not in part:
        return part
    fields = {name: _keeping(field, f"{path}.{name}") for name, field in part["properties"].items()}
    return {**part, "properties": fields, _KEEP: True}


def _parts(part: Mapping[str, Any], path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield every object of ours with its path, outer ones first."""
    if path == _OPAQUE or "properties" not in part:
        return
    yield path, part
    for name, field in part["properties"].items():
        yield from _parts(field, f"{path}.{name}")


def _places(parts: list[tuple[str, Mapping[str, Any]]]) -> dict[str, str]:
    """Map each field name to the paths where a field of that name exists."""
    places: dict[str, list[str]] = {}
    for path, part in parts:
        for name in part["properties"]:
            places.setdefault(name, []).append(f"{path}.{name}")
    return {name: " or ".join(paths) for name, paths in places.items()}


def _variable(path: str) -> str:
    return path.replace(".", "_")


def _unknown(path: str, part: Mapping[str, Any]) -> str:
    known = ", ".join(f"'{name}'" for name in part["properties"])
    optional = "".join(f".?{name}" for name in path.split("."))
    return f"dyn(object){optional}.orValue({{}}).filter(name, !(name in [{known}]))"


def _message(path: str, part: Mapping[str, Any], places: Mapping[str, str]) -> str:
    first = f"variables.{_variable(path)}[0]"
    elsewhere = ", ".join(
        f"'{name}': '{at}'" for name, at in places.items() if name not in part["properties"]
    )
    hint = f"{{{elsewhere}}}[?{first}].optMap(at, ': write it as ' + at).orValue('')"
    return f"'unknown field {path}.' + {first} + {hint} + '; the fields of {path} are {_listed(part)}'"


def _listed(part: Mapping[str, Any]) -> str:
    """List the names of the fields, with those of the next level in braces."""
    return ", ".join(
        f"{name} {{{', '.join(field['properties'])}}}" if "properties" in field else name
        for name, field in part["properties"].items()
    )
