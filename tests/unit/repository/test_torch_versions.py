"""The extras allow the versions of torch that tests run on, and no others."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[3]
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
