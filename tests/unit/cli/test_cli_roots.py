"""What a command takes as a root: a URI, a path, and no checkpoint's folder; and what it shows of a commit."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from stepkeeper.errors import BadUriError
from stepkeeper.storage import root_uri
from stepkeeper_testing.checkpoints import SmallRoot

Run = Callable[..., Result]
METRICS = {"accuracy": "0.123456789", "grad_norm": "nan", "loss": "2.5", "lr": "0.0001"}


@pytest.fixture
def root(url: str) -> SmallRoot:
    root = SmallRoot(url)
    root.begin()
    root.save(10)
    root.save(20, metrics=METRICS)
    return root


@pytest.mark.parametrize(
    "command", [["ls"], ["show"], ["path"], ["verify"], ["doctor", "--read-only"], ["gc"]]
)
def test_a_path_is_as_good_as_a_uri(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    root = SmallRoot((tmp_path / "run").as_uri())
    root.begin()
    root.save(10)
    by_uri = run(*command, root.url)
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "run", "run", "./run/", f"../{tmp_path.name}/run"):
        by_path = run(*command, path)
        assert (by_path.exit_code, by_path.stdout) == (by_uri.exit_code, by_uri.stdout)
    assert by_uri.exit_code == 0


def test_an_empty_path_names_no_root() -> None:
    with pytest.raises(BadUriError, match="names no root"):
        root_uri("")


COMMANDS = [
    ["ls"],
    ["ls", "--all"],
    ["show"],
    ["path"],
    ["verify"],
    ["doctor"],
    ["gc"],
    ["repair"],
    ["watch"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_checkpoints_folder_is_no_empty_root(run: Run, tmp_path: Path, command: list[str]) -> None:
    root = SmallRoot((tmp_path / "run").as_uri())
    root.begin()
    root.save(20)
    folder = root.log.state.commits[1].folder
    before = root.contents()
    for place, what in ((folder, "is one checkpoint"), ("20", "is the folder of the checkpoints of step 20")):
        result = run(*command, f"{root.store.uri}/{place}")
        assert (result.exit_code, result.stdout) == (2, "")
        assert what in result.stderr
        assert f"its root is probably {root.store.uri}\n" in result.stderr
    assert root.contents() == before


@pytest.mark.parametrize("command", [each for each in COMMANDS if each != ["watch"]], ids=" ".join)
@pytest.mark.parametrize("there", [None, "a file"])
def test_a_mistyped_path_is_no_empty_root(
    run: Run, tmp_path: Path, command: list[str], there: str | None
) -> None:
    mistyped = tmp_path / "rnu ü"
    if there:
        mistyped.write_text(there)
    result = run(*command, mistyped)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{mistyped}{' is a file' if there else ': no such folder'}" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ([mistyped.name] if there else [])


def test_a_file_becomes_no_root_that_could_be_watched(run: Run, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    result = run("watch", tmp_path / "run")
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{tmp_path / 'run'} is a file" in result.stderr


def test_a_folder_that_a_run_is_yet_to_write_to_is_a_root(run: Run, tmp_path: Path) -> None:
    assert "nothing has been saved here yet" in run("ls", tmp_path).stderr
    assert run("doctor", tmp_path).exit_code == 0


def test_another_writers_folder_is_no_empty_root(run: Run, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"stock DCP's")
    result = run("ls", tmp_path.as_uri())
    assert (result.exit_code, result.stdout) == (2, "")
    assert "is one checkpoint" in result.stderr
    assert "stock torch.distributed.checkpoint reads it" in result.stderr


def test_ls_shows_metrics_where_there_are_any(run: Run, root: SmallRoot) -> None:
    header, latest, line = (each.split() for each in run("ls", root.url).stdout.splitlines())
    assert header[-2:] == ["AGE", "METRICS"]
    assert latest[-4:] == ["accuracy=0.123457", "grad_norm=nan", "loss=2.5", "…"]
    assert line[-1] == "-"


def test_show_shows_all_metrics(run: Run, root: SmallRoot) -> None:
    said = run("show", root.url).stdout
    assert "metrics:    accuracy=0.123457 grad_norm=nan loss=2.5 lr=0.0001\n" in said
    assert "loss=2.5" in run("watch", root.url, "--count", 1).stdout


def test_documents_have_exact_metrics_and_who_saved(run: Run, root: SmallRoot) -> None:
    expected = {"loss": 2.5, "accuracy": 0.123456789, "grad_norm": "nan", "lr": 0.0001}
    for command in (["show"], ["watch", "--count", 1]):
        found = json.loads(run(*command, root.url, "--json").stdout)
        assert (found["metrics"], found["host"]) == (expected, "host-0")
        assert not any(isinstance(value, float) and math.isnan(value) for value in found["metrics"].values())
    latest, line = json.loads(run("ls", root.url, "--json").stdout)["commits"]
    assert (latest["metrics"], line["metrics"]) == (expected, {})
    assert latest["owner"]["name"] == "default/lm"


def test_a_process_without_an_operator_is_told_by_its_host(run: Run, url: str) -> None:
    root = SmallRoot(url)
    root.claim = root.log.begin(host="vm-7")
    root.save(10)
    assert "saved by:   a process without an operator, on vm-7, claim 0\n" in run("show", url).stdout
