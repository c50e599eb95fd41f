"""Test what is installed: one version everywhere, types that others see, and versions of torch that tests run on."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from page_blocks import ROOT

import stepkeeper

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


EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]["optional-dependencies"]
RELEASES = sorted((path.name for path in (ROOT / "tests/data/torch_releases").iterdir()), key=Version)


def requirement(extra: str, name: str) -> Requirement:
    (found,) = (each for each in map(Requirement, EXTRAS[extra]) if each.name == name)
    return found


def pinned(lock: str, name: str) -> str:
    text = (ROOT / lock).read_text(encoding="utf-8")
    (version,) = re.findall(rf"^{name}==(\S+)", text, re.MULTILINE)
    return str(version)


@pytest.mark.parametrize("extra", ["torch", "prometheus"])
def test_an_extra_allows_what_is_tested(extra: str) -> None:
    allowed = requirement(extra, "torch").specifier
    assert all(release in allowed for release in RELEASES)
    newest = Version(RELEASES[-1])
    assert f"{newest.major}.{newest.minor}.99" in allowed
    assert f"{newest.major}.{newest.minor + 1}.0" not in allowed
    assert "2.8.0" not in allowed


def test_torch_xla_comes_with_the_torch_that_it_was_built_for() -> None:
    for name, lock_name in (("torch", "torch"), ("torch_xla", "torch-xla")):
        assert str(requirement("xla", name).specifier) == f"=={pinned('requirements.lock', lock_name)}"


def test_the_locks_have_the_oldest_and_the_newest() -> None:
    assert pinned("requirements.lock", "torch") == RELEASES[0]
    assert pinned("requirements-newest.lock", "torch") == RELEASES[-1]
    assert "torch-xla" not in (ROOT / "requirements-newest.lock").read_text(encoding="utf-8")


def test_the_library_names_no_accelerator_but_xla() -> None:
    """torch.accelerator has what is needed of any other one."""
    sources = [*(ROOT / "planners").rglob("*.py"), *(ROOT / "runtime").rglob("*.py")]
    named = [path for path in sources if re.search(r"\.(cuda|xpu|tpu)\b", path.read_text(encoding="utf-8"))]
    assert len(sources) > 100
    assert named == []
