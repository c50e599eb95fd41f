"""The command on a root that each test makes: in a folder, and in memory."""

import secrets
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from stepkeeper.cli.app import app
from stepkeeper_testing.checkpoints import SmallRoot

Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    """run("ls", url): what `stepkeeper ls url` printed, and its exit code."""

    def run(*arguments: str | int) -> Result:
        return CliRunner().invoke(app, ["--patience", "0", *map(str, arguments)])

    return run


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "memory":
        return f"memory://{secrets.token_hex(8)}"
    return (tmp_path / "a root").as_uri()


@pytest.fixture
def root(request: pytest.FixtureRequest, url: str) -> SmallRoot:
    """The root that a file's ROOT plays."""
    return SmallRoot(url, words=request.module.ROOT)
