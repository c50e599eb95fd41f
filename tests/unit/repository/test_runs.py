"""Test how runs of tests are put together, and that what sabotage and mutants change is there."""

import ast
from importlib import import_module
from pathlib import Path

import pytest
import side_by_side
import tally
from mechanisms import MECHANISMS
from page_blocks import ROOT


def test_the_plan_has_each_file_with_end_to_end_tests_and_trainings_in_one_lane() -> None:
    expected = {*side_by_side.E2E.glob("test_*.py"), *side_by_side.CONTRACT.glob("test_*.py")}
    named = {*side_by_side.TRAININGS, *side_by_side.LONGEST}
    assert named <= {file.stem for file in expected}
    first, *others = side_by_side.plan()
    assert sorted(first) == sorted(expected)
    assert others
    for order in others:
        assert {file.stem for file in expected - set(order)} == set(side_by_side.TRAININGS)


@pytest.mark.parametrize("left", [None, "<testsuite><testcase"])
def test_a_file_whose_process_crashed_is_an_error(tmp_path: Path, left: str | None) -> None:
    xml = tmp_path / "test_x.xml"
    if left is not None:
        xml.write_text(left)
    assert tally.read_results(xml) == []
    (crash,) = tally.write_crash(xml, "tests/e2e/test_x.py", "pytest ended with -11")
    assert (crash.name, crash.outcome) == ("tests/e2e/test_x.py::(all)", "error")
    assert tally.main(["1", str(xml)]) == 1


def test_outcomes_are_counted_and_flaky_tests_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results.xml"
    results.write_text(
        '<testsuite><testcase classname="tests.e2e.test_x" name="test_a[1.5]" time="1"><failure/></testcase>'
        '<testcase classname="tests.contract.test_y.TestStore" name="test_b" time="1"/>'
        '<testcase classname="" name="tests.e2e.test_z" time="0"><error/></testcase></testsuite>'
    )
    names = [result.name for result in tally.read_results(results)]
    assert names[:2] == ["tests/e2e/test_x.py::test_a[1.5]", "tests/contract/test_y.py::TestStore::test_b"]
    (tmp_path / tally.FLAKY).write_text("flaky: test_outcomes::test_once\n")
    assert tally.main(["61.5", str(results)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == "flaky: test_outcomes::test_once"
    assert lines[-1] == "===== 1 failed, 1 passed, 1 error in 61.50s (0:01:01) ====="
    assert tally.exit_code(tally.count([])) == 5, "a run of no tests is no success"


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
