"""Each mechanism is taken out of all processes of a test, which must fail then, and passes otherwise."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from mechanisms import MECHANISMS

HERE: Final = Path(__file__).parent
_TIMEOUT_S: Final = 60
"""The time in which a test fails that waits for ever."""

_OWN_MISTAKE: Final = re.compile(r"(?:mechanisms|replacements)\.py:\d+: (?:Type|Attribute|Name|Import)Error")


def run(test: str, **env: str) -> "subprocess.CompletedProcess[str]":
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    options = f"-q -x -p no:cacheprovider --timeout={_TIMEOUT_S}".split()
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, test],
        cwd=HERE.parents[1],
        env=os.environ | {"PYTHONPATH": path} | env,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


@pytest.mark.parametrize("test", sorted({each.test for each in MECHANISMS.values()}))
def test_with_all_mechanisms_the_test_passes(test: str) -> None:
    done = run(test)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.parametrize("name", MECHANISMS)
def test_without_the_mechanism_its_test_fails(name: str, tmp_path: Path) -> None:
    log = tmp_path / "sabotage"
    done = run(MECHANISMS[name].test, SABOTAGE=name, SABOTAGE_LOG=str(log))
    output = done.stdout + done.stderr
    shown = output[-5000:]
    assert log.exists(), f"no process has imported {MECHANISMS[name].module}\n{shown}"
    assert "failed" not in log.read_text(), f"{MECHANISMS[name].symbol} could not be replaced\n{shown}"
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, shown
    # A test that can't be collected or set up is an error, and shows nothing.
    assert re.search(r"^\d+ failed(?:, \d+ \w+)*(?<!errors)(?<!error) in ", done.stdout, re.MULTILINE), shown
    assert not _OWN_MISTAKE.search(output), shown
    assert MECHANISMS[name].hangs or "from pytest-timeout" not in output, shown
