"""Test the conversion of pydantic's JSON schema to one that a CRD may have."""

from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field

from stepkeeper_operator.api.cel import CelRule
from stepkeeper_operator.crds.pod_template import trim_pod_template
from stepkeeper_operator.crds.schema import add_rules, structural_schema
from stepkeeper_operator.errors import GenerationError


class Inner(BaseModel):
    count: int = 3


class Outer(BaseModel):
    inner: Inner = Inner()
    name: str | None = None
    items: tuple[Inner, ...] = ()


class WithMap(BaseModel):
    labels: Annotated[dict[str, Annotated[str, Field(max_length=63)]], Field(max_length=4)]


class WithFloat(BaseModel):
    ratio: float


class WithUnion(BaseModel):
    port: int | str


def test_references_are_resolved_and_an_optional_field_is_simply_absent() -> None:
    inner = {"type": "object", "properties": {"count": {"type": "integer", "format": "int64", "default": 3}}}
    assert structural_schema(Outer) == {
        "type": "object",
        "properties": {
            "inner": {**inner, "default": {"count": 3}},
            "name": {"type": "string"},
            "items": {"type": "array", "default": [], "items": inner, "x-kubernetes-list-type": "atomic"},
        },
    }


def test_a_map_keeps_its_bounds() -> None:
    assert structural_schema(WithMap)["properties"]["labels"] == {
        "type": "object",
        "maxProperties": 4,
        "additionalProperties": {"type": "string", "maxLength": 63},
    }


def test_a_rule_for_a_field_that_is_not_there_is_an_error() -> None:
    with pytest.raises(GenerationError, match="no field 'iner' in the schema; known: inner, name, items"):
        add_rules(structural_schema(Outer), [CelRule(at="iner", cel="true", message="")])


def test_a_pod_template_is_trimmed_and_bounded() -> None:
    name = {"type": "string", "description": "d"}
    container = {
        "type": "object",
        "properties": {
            "name": name,
            "description": {"type": "string", "description": "a field of that name stays"},
            "env": {"type": "array", "items": {"type": "object", "properties": {"name": name}}},
        },
    }
    kinds = ("containers", "initContainers", "ephemeralContainers")
    spec = {kind: {"type": "array", "items": container} for kind in kinds} | {
        "restartPolicy": {"type": "string"}
    }
    meta = {key: {"type": "object"} for key in ("annotations", "labels", "finalizers")}
    template = {"properties": {"metadata": {"properties": meta}, "spec": {"properties": spec}}}
    trimmed = trim_pod_template(jobset_crd_around(template))["properties"]
    assert set(trimmed["metadata"]["properties"]) == {"annotations", "labels"}
    assert set(trimmed["spec"]["properties"]) == {"containers", "initContainers", "restartPolicy"}
    containers = trimmed["spec"]["properties"]["containers"]
    assert containers["maxItems"] == 32
    assert containers["items"]["properties"]["name"] == {"type": "string", "maxLength": 256}
    assert containers["items"]["properties"]["description"] == {"type": "string"}
    assert containers["items"]["properties"]["env"]["maxItems"] == 512


def jobset_crd_around(template: dict[str, Any]) -> dict[str, Any]:
    job = {"properties": {"spec": {"properties": {"template": template}}}}
    replicated_jobs = {"items": {"properties": {"template": job}}}
    schema = {"properties": {"spec": {"properties": {"replicatedJobs": replicated_jobs}}}}
    return {"spec": {"versions": [{"schema": {"openAPIV3Schema": schema}}]}}


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (WithFloat, r"WithFloat\.ratio: number has no place in a CRD"),
        (WithUnion, r"WithUnion\.port: a union of 2 types"),
    ],
)
def test_what_has_no_place_in_the_api_is_named(model: type[BaseModel], said: str) -> None:
    with pytest.raises(GenerationError, match=said):
        structural_schema(model)
