"""What a command takes as a root, what it shows of a commit, and what a shell completes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

import stepkeeper
from stepkeeper_testing.checkpoints import SmallRoot

Run = Callable[..., Result]
METRICS = {"accuracy": "0.123456789", "grad_norm": "nan", "loss": "2.5", "lr": "0.0001"}
COMMANDS = ("ls", "ls --all", "show", "path", "verify", "doctor", "gc", "repair")


@pytest.mark.parametrize("command", ["ls", "show", "path", "verify", "doctor --read-only", "gc"])
def test_a_path_is_as_good_as_a_uri(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    root = SmallRoot((tmp_path / "run").as_uri(), words="begin 10")
    for each in tmp_path.rglob("*"):
        os.utime(each, (1e9, 1e9))  # ages are shown, and these change once a day
    by_uri = run(*command.split(), root.url)
    assert by_uri.exit_code == 0
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "run", "run", "./run/", f"../{tmp_path.name}/run"):
        by_path = run(*command.split(), path)
        assert (by_path.exit_code, by_path.stdout) == (by_uri.exit_code, by_uri.stdout)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("place", "says"),
    [
        pytest.param("run/{folder}", "is one checkpoint: its root is probably {root}", id="a checkpoint"),
        pytest.param("run/20", "is the folder of the checkpoints of step 20: its root", id="a step"),
        pytest.param("theirs", "stock torch.distributed.checkpoint reads it", id="another writer's"),
        pytest.param("theirs/.metadata", ".metadata is a file", id="a file"),
        pytest.param("rnu ü", "rnu ü: no such folder", id="nothing"),
    ],
)
def test_another_place_is_no_empty_root(
    run: Run, tmp_path: Path, command: str, place: str, says: str
) -> None:
    root = SmallRoot((tmp_path / "run").as_uri(), words="begin 20")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / ".metadata").write_bytes(b"stock DCP's")
    folder, before = root.log.state.commits[1].folder, sorted(tmp_path.rglob("*"))
    result = run(*command.split(), tmp_path / place.format(folder=folder))
    assert (result.exit_code, result.stdout) == (2, "")
    for part in says.format(root=root.store.uri).split(": "):
        assert part in result.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_a_run_is_yet_to_write_to_is_a_root(run: Run, tmp_path: Path) -> None:
    assert "nothing has been saved here yet" in run("ls", tmp_path).stderr
    assert run("doctor", tmp_path).exit_code == 0


def test_metrics_are_shown_where_there_are_any_and_exact_in_documents(run: Run, url: str) -> None:
    root = SmallRoot(url, words="begin 10")
    root.save(20, metrics=METRICS)
    header, latest, line = (each.split() for each in run("ls", url).stdout.splitlines())
    assert header[-2:] == ["AGE", "METRICS"]
    assert latest[-4:] == ["accuracy=0.123457", "grad_norm=nan", "loss=2.5", "…"]
    assert line[-1] == "-"
    assert "metrics:    accuracy=0.123457 grad_norm=nan loss=2.5 lr=0.0001\n" in run("show", url).stdout
    expected = {"loss": 2.5, "accuracy": 0.123456789, "grad_norm": "nan", "lr": 0.0001}
    found = json.loads(run("show", url, "--json").stdout)
    assert (found["metrics"], found["host"]) == (expected, "host-0")
    commits = json.loads(run("ls", url, "--json").stdout)["commits"]
    assert [each["metrics"] for each in commits] == [expected, {}]
    assert commits[0]["owner"]["name"] == "default/lm"


def test_a_process_without_an_operator_is_told_by_its_host(run: Run, url: str) -> None:
    root = SmallRoot(url)
    root.claim = root.log.begin(host="vm-7")
    root.save(10)
    assert "saved by:   a process without an operator, on vm-7, claim 0\n" in run("show", url).stdout


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


def test_it_says_its_version(run: Run) -> None:
    said = run("--version")
    assert (said.exit_code, said.stdout) == (0, f"stepkeeper {stepkeeper.__version__}\n")
