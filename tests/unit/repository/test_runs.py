"""Test how runs of tests are put together: lanes, a second chance for a file, one closing line for all."""

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import side_by_side
import tally
from lanes import Attempt, Lanes
from typing_extensions import override

OUTCOMES = """
import pytest

@pytest.fixture
def broken_setup(): raise OSError
@pytest.fixture
def broken_teardown():
    yield
    raise OSError
def test_passes(): pass
def test_passes_too(): pass
def test_fails(): assert False
def test_is_skipped(): pytest.skip()
def test_error(broken_setup): pass
def test_ends_badly(broken_teardown): pass
"""


class Site:
    """Runs a file as its script says: by file, whether each run of it passes."""

    def __init__(self, **script: list[bool]) -> None:
        self.script = script
        self.calls: list[str] = []
        self.after: Callable[[], None] = lambda: None

    def run(self, file: Path, lane: int) -> Attempt:
        self.calls.append(f"{lane}: {file.stem}")
        passed = self.script[file.stem].pop(0)
        self.after()
        return Attempt(passed=passed, failed_tests=() if passed else (f"{file.stem}::test",))

    def renew(self, lane: int) -> bool:
        self.calls.append(f"{lane}: renew")
        return True

    def clear(self, lane: int) -> None:
        self.calls.append(f"{lane}: clear")

    def has_second_chance(self, file: Path) -> bool:
        return file.stem != "only_once"


def run(site: Site, *orders: list[str]) -> Lanes:
    lanes = Lanes(workplace=site)
    lanes.run_all([[Path(f"{name}.py") for name in order] for order in orders])
    return lanes


def test_a_file_that_fails_once_is_flaky_and_was_run_again_on_something_fresh() -> None:
    site = Site(good=[True], shaky=[False, True])
    lanes = run(site, ["shaky", "good"])
    assert site.calls == ["0: renew", "0: shaky", "0: renew", "0: shaky", "0: good", "0: clear"]
    assert (lanes.failed, lanes.flaky) == ([], ["shaky::test"])


def test_a_file_that_fails_twice_has_failed() -> None:
    lanes = run(Site(bad=[False, False]), ["bad"])
    assert (lanes.failed, lanes.flaky) == ([Path("bad.py")], [])


def test_a_file_without_a_second_chance_has_failed_at_once() -> None:
    lanes = run(Site(only_once=[False]), ["only_once"])
    assert lanes.failed == [Path("only_once.py")]


def test_nothing_is_run_or_run_again_after_a_stop() -> None:
    site = Site(bad=[False], good=[True])
    lanes = Lanes(workplace=site)
    site.after = lanes.stopping.set
    lanes.run_all([[Path("bad.py"), Path("good.py")]])
    assert site.calls == ["0: renew", "0: bad", "0: clear"]
    assert lanes.failed == [Path("bad.py")]


def test_each_file_runs_in_one_lane_only() -> None:
    names = [f"file_{number}" for number in range(9)]
    site = Site(**{name: [True] for name in names})
    run(site, names, names[::-1], names)
    assert sorted(call[3:] for call in site.calls if "file" in call) == names


class SlowSecondLane(Site):
    """The second lane is in its first file, b, until the first lane has run c."""

    def __init__(self) -> None:
        super().__init__(a=[True], b=[True], c=[True])
        self.b_has_begun, self.c_has_ended = threading.Event(), threading.Event()

    @override
    def run(self, file: Path, lane: int) -> Attempt:
        if file.stem == "a":
            assert self.b_has_begun.wait(60)
        if file.stem == "b":
            self.b_has_begun.set()
            assert self.c_has_ended.wait(60)
        if file.stem == "c":
            self.c_has_ended.set()
        return super().run(file, lane)


def test_a_lane_begins_with_its_own_files_and_then_helps_the_others() -> None:
    site = SlowSecondLane()
    run(site, ["a", "b", "c"], ["b", "c", "a"])
    assert {call for call in site.calls if len(call) == len("0: a")} == {"0: a", "1: b", "0: c"}


def test_the_plan_has_each_file_with_end_to_end_tests_and_trainings_in_one_lane() -> None:
    expected = {*side_by_side.E2E.glob("test_*.py"), *side_by_side.CONTRACT.glob("test_*.py")}
    named = {*side_by_side.TRAININGS, *side_by_side.LONGEST}
    assert named <= {file.stem for file in expected}
    first, *others = side_by_side.plan()
    assert sorted(first) == sorted(expected)
    assert others
    for order in others:
        assert {file.stem for file in expected - set(order)} == set(side_by_side.TRAININGS)


@pytest.fixture
def pytest_run(tmp_path: Path) -> "subprocess.CompletedProcess[str]":
    (tmp_path / "test_outcomes.py").write_text(OUTCOMES)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--junitxml=results.xml",
        "test_outcomes.py",
    ]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)


def test_outcomes_are_counted_as_pytest_counts_them(
    pytest_run: "subprocess.CompletedProcess[str]", tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / tally.FLAKY).write_text("flaky: test_outcomes::test_once\n")
    assert tally.main(["61.5", str(tmp_path / "results.xml"), str(tmp_path / "results.xml")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "1 failed, 3 passed, 1 skipped, 2 errors in" in pytest_run.stdout
    assert lines[-1] == "===== 2 failed, 4 passed, 2 skipped, 4 errors in 61.50s (0:01:01) ====="
    assert lines[-2] == "flaky: test_outcomes::test_once"


def test_a_run_of_no_tests_is_no_success() -> None:
    assert tally.exit_code(tally.count([])) == 5
    assert "no tests ran" in tally.closing_line({}, 1.0)


def test_tests_are_named_as_pytest_takes_them(tmp_path: Path) -> None:
    (tmp_path / "results.xml").write_text(
        '<testsuite><testcase classname="tests.e2e.test_x" name="test_a[1.5]" time="1"/>'
        '<testcase classname="tests.contract.test_y.TestStore" name="test_b" time="1"/>'
        '<testcase classname="" name="tests.e2e.test_z" time="0"><error/></testcase></testsuite>'
    )
    assert [result.name for result in tally.read_results(tmp_path / "results.xml")] == [
        "tests/e2e/test_x.py::test_a[1.5]",
        "tests/contract/test_y.py::TestStore::test_b",
        "tests.e2e.test_z",
    ]


@pytest.mark.parametrize("left", [None, "<testsuite><testcase"])
def test_a_file_whose_process_crashed_is_an_error(tmp_path: Path, left: str | None) -> None:
    xml = tmp_path / "test_x.xml"
    if left is not None:
        xml.write_text(left)
    assert tally.read_results(xml) == []
    (crash,) = tally.write_crash(xml, "tests/e2e/test_x.py", "pytest ended with -11")
    assert (crash.name, crash.outcome) == ("tests/e2e/test_x.py::(all)", "error")
    assert tally.main(["1", str(xml)]) == 1


def test_where_nothing_fresh_can_be_had_there_is_no_second_run() -> None:
    class Broken(Site):
        @override
        def renew(self, lane: int) -> bool:
            return False

    site = Broken(bad=[False, True])
    assert run(site, ["bad"]).failed == [Path("bad.py")]
    assert site.script == {"bad": [True]}
