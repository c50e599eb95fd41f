"""Test what is installed: one version everywhere, and types that the type checkers of others see."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import stepkeeper

ROOT = Path(__file__).parents[3]

USER = """
from stepkeeper import __version__
from stepkeeper.errors import FencedError
from stepkeeper.policy.save import EveryNSteps

reveal_type(__version__)
reveal_type(EveryNSteps(5).steps)
reveal_type(FencedError())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder],
        cwd=ROOT,
        check=True,
        timeout=120,
        capture_output=True,
    )
    (found,) = folder.glob("*.whl")
    return found


def test_the_wheel_has_the_version_that_the_library_says(wheel: Path) -> None:
    assert wheel.name == f"stepkeeper-{stepkeeper.__version__}-py3-none-any.whl"


def test_every_package_says_that_it_has_types(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    packages = {name.partition("/")[0] for name in names if name.endswith("/__init__.py")}
    assert packages == {"stepkeeper", "stepkeeper_planners", "stepkeeper_operator"}
    assert [package for package in packages if f"{package}/py.typed" not in names] == []


def test_a_users_type_checker_sees_the_types(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True, timeout=120)
    (packages,) = environment.glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(packages)
    (tmp_path / "user.py").write_text(USER, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "user.py", "--strict"]
    done = subprocess.run(
        [*command, f"--python-executable={environment}/bin/python"],
        cwd=tmp_path,
        env={"MYPY_CACHE_DIR": "cache"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    revealed = [line.rpartition("is ")[2] for line in done.stdout.splitlines() if "Revealed" in line]
    assert revealed == ['"str"', '"int"', '"stepkeeper.errors.FencedError"'], done.stdout + done.stderr
