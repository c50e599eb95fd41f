"""A run of tests in several processes ends with a failure, and with all other tests run, if one of them dies."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
PASSING = "def test_1(): pass\ndef test_2(): pass\ndef test_3(): pass\n"
DYING = "import os\ndef test_first(): pass\ndef test_dies(): os._exit(3)\ndef test_last(): pass\n"
DYING_AT_LAST = "import os\ndef test_first(): pass\ndef test_dies(): os._exit(3)\n"


@contextmanager
def ended_with_its_group(process: "subprocess.Popen[str]") -> Iterator[None]:
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def run(folder: Path, n_workers: int, files: dict[str, str]) -> tuple[int, dict[str, int]]:
    """Run pytest with the conftest.py of this tree over the files. Returns its exit code and its last line's counts."""
    (folder / "tests").mkdir()
    (folder / "tests" / "conftest.py").symlink_to(TESTS / "conftest.py")
    for name, text in files.items():
        (folder / "tests" / f"test_{name}.py").write_text(text)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    options = ["-q", "-W", "ignore", "-n", str(n_workers), "--dist", "loadfile", "--no-loadscope-reorder"]
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, "tests"],
        cwd=folder,
        env={**env, "PYTHONPATH": str(TESTS / "forks")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    with process, ended_with_its_group(process):
        said, _ = process.communicate(timeout=240)
    counts = re.findall(r"(\d+) (passed|failed|error)", said.splitlines()[-1])
    return process.returncode, {what: int(number) for number, what in counts}


@pytest.mark.parametrize("n_workers", [1, 2])
def test_all_other_tests_are_run_once(tmp_path: Path, n_workers: int) -> None:
    """Two workers die: one in the midst of a file, before which it has finished others, and one in the last test."""
    files = {f"{letter}_passes": PASSING for letter in "abdef"} | {"c_dies": DYING, "g_dies": DYING_AT_LAST}
    assert run(tmp_path, n_workers, files) == (1, {"failed": 2, "passed": 18})
