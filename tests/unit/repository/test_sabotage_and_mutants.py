"""Test that what sabotage and mutants change is there, and so are the tests that must notice."""

import ast
from importlib import import_module
from pathlib import Path

import pytest
from mechanisms import MECHANISMS
from mutants import CORES, PACKAGES, Core

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


@pytest.mark.parametrize("core", CORES.values(), ids=CORES)
def test_each_pattern_of_a_core_finds_something(core: Core) -> None:
    sources = [Path(package).parent for package in PACKAGES]
    for pattern in core.modules:
        assert any(list((ROOT / source).glob(pattern.removeprefix("src/"))) for source in sources), pattern
    for pattern in (*core.tests, *core.without):
        assert list(ROOT.glob(pattern)), pattern
