"""Trainings that fork workers whenever they like: the companion starts, is watched and ends all the same."""

import json
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer

SCRIPTS = Path(__file__).parent / "companion_forks"


@pytest.fixture(scope="module", params=["hooked", "unhooked"])
def facts(
    request: pytest.FixtureRequest, torch_server: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What happened to a training that forked while its first save started the companion: by os.fork, or in C."""
    root = (tmp_path_factory.mktemp("root") / "root").as_uri()
    done = torch_server.run([SCRIPTS / "first_save.py", root, request.param], timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    return {**json.loads(done.stdout.splitlines()[-1]), "how": request.param}


def test_a_first_save_commits_while_a_worker_lives_that_was_forked_at_the_companions_start(
    facts: dict[str, Any],
) -> None:
    assert facts.get("committed") == 1, facts


def test_a_companion_that_dies_is_missed_at_once_whoever_holds_its_socket(facts: dict[str, Any]) -> None:
    assert facts.get("noticed"), facts
    assert facts["noticed_s"] < 15.0
    assert facts["committed_then"] == 2


def test_a_worker_that_python_forks_inherits_nothing_of_the_managers(facts: dict[str, Any]) -> None:
    if facts["how"] == "hooked":
        assert facts.get("inherited") == [], facts
        assert facts["mapped"] == 0, "the memory of snapshots would be kept for as long as the worker lives"
    else:
        assert facts.get("inherited"), (
            "the worker was to hold the socket: else nothing is shown by the others"
        )
