"""Trainings that fork workers whenever they like: the companion starts, is watched and ends all the same."""

import json
import os
import secrets
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


def test_a_training_that_fails_right_after_such_a_fork_ends(torch_server: ForkServer, tmp_path: Path) -> None:
    root = (tmp_path / "root").as_uri()
    done = torch_server.run([SCRIPTS / "user_error.py", root], timeout=200)
    assert done.returncode == 1
    assert "an error of the training" in done.stderr


def test_children_that_leave_the_managers_block_end_and_take_nothing_along(
    torch_server: ForkServer, tmp_path: Path
) -> None:
    root = (tmp_path / "root").as_uri()
    done = torch_server.run([SCRIPTS / "child_leaves.py", root], timeout=150)
    assert done.returncode == 0, done.stderr[-4000:]
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts == {"choose_an_end": 5, "fail": 1, "wait": 6, "close": 7, "steps": [1, 2, 3]}, done.stderr


@pytest.mark.parametrize(
    "n_rounds", [20, pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(3000)])]
)
def test_no_moment_of_a_fork_costs_a_save_or_hides_a_lost_companion(
    torch_server: ForkServer, tmp_path: Path, n_rounds: int
) -> None:
    seed = int(os.environ.get("STEPKEEPER_SEED", secrets.randbelow(2**32)))
    print(f"STEPKEEPER_SEED={seed}")
    command = [SCRIPTS / "storm.py", (tmp_path / "roots").as_uri(), seed, n_rounds]
    done = torch_server.run(command, timeout=14 * n_rounds)
    assert done.returncode == 0, f"{done.stdout}{done.stderr[-4000:]}"
    assert done.stdout == ""
