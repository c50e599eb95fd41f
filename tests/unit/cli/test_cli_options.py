"""Test what the command says of itself: its version, its help, and the completion for shells."""

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import stepkeeper
from stepkeeper.cli.app import app


def test_it_says_its_version() -> None:
    said = CliRunner().invoke(app, ["--version"])
    assert (said.exit_code, said.stdout) == (0, f"stepkeeper {stepkeeper.__version__}\n")


@pytest.mark.parametrize(("words", "found"), [("stepkeeper sh", {"show"}), ("stepkeeper ls --a", {"--all"})])
def test_a_shell_completes_commands_and_options(words: str, found: set[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from stepkeeper.cli import main; main()"],
        env={
            **os.environ,
            "_STEPKEEPER_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split()) - 1),
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert set(done.stdout.split()) == found
