"""Test the conversion of pydantic's JSON schema to one that a CRD may have."""

import pytest
from pydantic import BaseModel

from stepkeeper_operator.api.cel import CelRule
from stepkeeper_operator.crds.schema import add_rules, structural_schema
from stepkeeper_operator.errors import GenerationError


class Inner(BaseModel):
    count: int = 3


class Outer(BaseModel):
    inner: Inner = Inner()
    name: str | None = None
    items: tuple[Inner, ...] = ()


class WithFloat(BaseModel):
    ratio: float


class WithUnion(BaseModel):
    port: int | str


def test_a_rule_for_a_field_that_is_not_there_is_an_error() -> None:
    with pytest.raises(GenerationError, match="no field 'iner' in the schema; known: inner, name, items"):
        add_rules(structural_schema(Outer), [CelRule(at="iner", cel="true", message="")])


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
