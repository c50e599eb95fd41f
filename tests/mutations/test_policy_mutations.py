"""Each patch in policy/ takes one rule of the operator's policy away; the test that it names goes red then."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

import pytest
from fork_server import ForkServer
from patching import MUTATED, PATCHES, REPOSITORY, THOROUGH, apply_patch

POLICY: Final = PATCHES / "policy"
RULES: Final = REPOSITORY / "operator/stepkeeper_operator/policy"
VALUES: Final = {"__init__.py", "history.py", "finding.py"}
"""Modules that decide nothing."""

_NOTICED_BY: Final = "Noticed by "


def _read_test(patch: Path) -> str:
    """Read which test a patch names in its first line."""
    first = patch.read_text(encoding="utf-8").partition("\n")[0]
    assert first.startswith(_NOTICED_BY), f"{patch.name} doesn't begin with the test that has to notice it"
    return first.removeprefix(_NOTICED_BY)


TESTS: Final = {patch.stem: _read_test(patch) for patch in sorted(POLICY.glob("*.patch"))}
"""By patch, the test that must notice."""

LIBRARIES: Final = (
    "pytest",
    "pydantic",
    "kubernetes.aio",
    "aiohttp",
    "cryptography.x509",
    "yaml",
    "prometheus_client",
)
"""What the operator and its tests import of others, but for pytest's plugins, which pytest has to import by itself."""


@pytest.fixture(scope="module")
def operator_server() -> Iterator[ForkServer]:
    with closing(ForkServer(*LIBRARIES)) as server:
        yield server


def test_each_module_of_the_policy_has_a_patch() -> None:
    patched = re.findall(
        r"^\+\+\+ b/(\S+)$", "".join(p.read_text() for p in POLICY.glob("*.patch")), re.MULTILINE
    )
    decides = {path for path in RULES.rglob("*.py") if path.name not in VALUES}
    assert {REPOSITORY / path for path in patched} >= decides


@pytest.mark.parametrize("name", TESTS)
def test_each_patch_applies(name: str) -> None:
    apply_patch(POLICY / f"{name}.patch", REPOSITORY, "--check")


@pytest.mark.parametrize("name", TESTS)
def test_without_a_rule_its_test_goes_red(operator_server: ForkServer, tmp_path: Path, name: str) -> None:
    operator = tmp_path / "operator"
    shutil.copytree(REPOSITORY / "operator", operator)
    apply_patch(POLICY / f"{name}.patch", tmp_path)
    done = operator_server.run(
        [
            MUTATED,
            operator,
            "stepkeeper_operator",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            THOROUGH,
            TESTS[name],
        ],
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        cwd=REPOSITORY,
        timeout=250,
    )
    said = done.stdout[-3000:] + done.stderr[-3000:]
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, said
    assert re.search(r"\b1 failed", said), said
