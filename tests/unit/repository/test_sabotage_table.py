"""Test that each mechanism that sabotage takes out is there, and so is the test that must notice."""

import ast
from importlib import import_module
from pathlib import Path

import pytest
from mechanisms import MECHANISMS

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", MECHANISMS)
def test_the_symbol_and_the_test_of_a_mechanism_exist(name: str) -> None:
    mechanism = MECHANISMS[name]
    owner, attribute = mechanism.find_owner(import_module(mechanism.module))
    assert mechanism.instead(vars(owner)[attribute]) is not None
    path, _, test = mechanism.test.partition("::")
    functions = [
        node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)
    ]
    assert test.partition("[")[0] in functions, f"no such test: {mechanism.test}"


def test_a_symbol_that_is_gone_is_no_mechanism() -> None:
    mechanism = MECHANISMS["fence"]
    with pytest.raises(AttributeError, match="check_claim is gone"):
        mechanism.find_owner(import_module("stepkeeper.log.reading"))
