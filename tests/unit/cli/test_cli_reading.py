"""ls, show, verify and path: what they print, what they find, and that they leave everything as it is."""

import calendar
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from stepkeeper.cli.blocks import CommitFindings, verify_commit
from stepkeeper.log import CommitRecord
from stepkeeper.storage import Store
from stepkeeper_testing.checkpoints import SmallRoot

Run = Callable[..., Result]


ROOT = "begin 10 20 begin@1 *1 15 20 !6 25"
"""Steps 10, 15, 25 on the line; 20 on an abandoned branch, and 20 quarantined."""


def lines(result: Result) -> list[list[str]]:
    assert (result.exit_code, result.stderr) == (0, "")
    return [line.split() for line in result.stdout.splitlines()]


def document(result: Result) -> dict[str, object]:
    assert result.exit_code in (0, 1), result.output
    return dict(json.loads(result.stdout))


def test_ls_is_the_latest_line_newest_first(run: Run, root: SmallRoot) -> None:
    header, *rows = lines(run("ls", root.url))
    assert header == ["SEQUENCE", "STEP", "STATE", "CLAIM", "ATTEMPT", "HOST", "SIZE", "VERIFIED", "AGE"]
    assert [row[:7] for row in rows] == [
        ["8", "25", "latest", "3", "default/lm", "0.1", "host-1"],
        ["5", "15", "line", "3", "default/lm", "0.1", "host-1"],
        ["1", "10", "line", "0", "default/lm", "0.0", "host-0"],
    ]
    assert [row[9] for row in rows] == ["-", "-", "yes"]


def test_ls_all_shows_all_commits(run: Run, root: SmallRoot) -> None:
    root.play("-5")
    _, *rows = lines(run("ls", "--all", root.url))
    assert [" ".join(row[:3]) for row in rows] == [
        "8 25 latest",
        "6 20 quarantined",
        "2 20 abandoned",
        "1 10 line",
    ]


def test_ls_as_a_document(run: Run, root: SmallRoot) -> None:
    found = document(run("ls", root.url, "--json"))
    assert set(found) == {"format", "uri", "root", "tail", "head", "claim", "owner", "commits"}
    assert (found["format"], found["tail"], found["head"], found["claim"]) == (1, 8, 8, 3)
    commits = found["commits"]
    assert isinstance(commits, list)
    latest = commits[0]
    keys = "sequence step state claim owner host parent size_bytes verified time_unix_s metrics commit_uri"
    assert set(latest) == set(keys.split())
    assert latest["commit_uri"].startswith(f"{root.store.uri}/25/3-")
    assert time.time() - 60 < latest["time_unix_s"] < time.time() + 60


def test_an_empty_root_is_no_error_to_list_but_shows_nothing(run: Run, url: str, tmp_path: Path) -> None:
    (tmp_path / "a root").mkdir()
    result = run("ls", url)
    assert (result.exit_code, result.stdout) == (0, "")
    assert "nothing has been saved here yet" in result.stderr
    assert document(run("ls", url, "--json"))["commits"] == []
    for command in ("show", "path", "verify"):
        result = run(command, url)
        assert (result.exit_code, result.stdout) == (1, ""), command
        assert result.stderr == "stepkeeper: nothing is committed here\n"


def test_show_says_who_saved_what(run: Run, root: SmallRoot) -> None:
    result = run("show", root.url, 15, "--tensors")
    assert result.exit_code == 0
    said = dict(line.split(":", 1) for line in result.stdout.splitlines() if ": " in line)
    assert said["saved by"].strip() == "default/lm, start 0.1, on host-1, claim 3"
    assert said["stored"].strip() == "by 1 rank, in 3 objects"
    assert said["content"].strip() == "1 tensor, 1 value"
    assert said["metrics"].strip() == "-"
    moment = said["saved"].split()[0]
    assert abs(calendar.timegm(time.strptime(moment, "%Y-%m-%dT%H:%M:%SZ")) - time.time()) < 60
    assert ["model.w", "float32", "[1,", "8]"] in [line.split() for line in result.stdout.splitlines()]
    found = document(run("show", root.url, "--sequence", 6, "--json"))
    shown = (found["step"], found["state"], found["n_tensors"], "tensors" in found)
    assert shown == (20, "quarantined", 1, False)


def test_a_step_off_the_line_is_named_by_its_sequence(run: Run, root: SmallRoot) -> None:
    result = run("path", root.url, 20)
    assert result.exit_code == 1
    assert result.stderr == "stepkeeper: step 20 isn't on the latest line, but has --sequence 2 or 6\n"
    result = run("path", root.url, 99)
    assert "no commit of step 99; there are: step 25 (sequence 8), " in result.stderr
    assert run("path", root.url, 15, "--sequence", 5).exit_code == 2


def test_path_is_a_folder_where_there_are_folders(run: Run, root: SmallRoot) -> None:
    place = run("path", root.url, 10).stdout.strip()
    if root.url.startswith("file"):
        assert (Path(place) / ".metadata").is_file()
    else:
        assert place.startswith(f"{root.url}/10/0-")
    assert document(run("path", root.url, 10, "--json"))["path"] == place


def test_verify_reads_every_block_and_writes_nothing(run: Run, root: SmallRoot) -> None:
    before = root.contents()
    result = run("verify", "--all", root.url)
    assert result.exit_code == 0
    assert [line.split()[1] for line in result.stdout.splitlines()] == ["25", "15", "20", "10"]
    for command in (["ls", "--all"], ["show"], ["gc", "--dry-run"], ["doctor"]):
        assert run(*command, root.url).exit_code == 0, command
    assert root.contents() == before


@pytest.mark.parametrize(
    "name", ["__0_0.distcp", "__1_0.distcp", ".metadata", "manifest.0.json", "manifest.1.json"]
)
@pytest.mark.parametrize("damage", ["flipped", "cut", "longer", "gone"])
def test_verify_names_what_is_bad(run: Run, url: str, name: str, damage: str) -> None:
    root = SmallRoot(url, words="begin 10x2")
    path = f"{root.log.state.commits[1].folder}/{name}"
    good = root.store.read(path)
    bad = {"flipped": good[:50] + bytes([good[50] ^ 1]) + good[51:], "cut": good[:-1], "longer": good + b"x"}
    root.change(path, bad.get(damage))
    result = run("verify", url)
    assert result.exit_code == 1
    assert f"BAD {path}" in result.stdout
    has_block = damage in ("flipped", "cut") and not name.startswith("manifest")
    assert (f"{name} block 0" in result.stdout) == has_block
    (found,) = json.loads(run("verify", url, "--json").stdout)["commits"]
    assert {each["object"] for each in found["bad"]} == {name}
    assert run("doctor", url).exit_code == (damage in ("cut", "gone"))


def test_verify_goes_on_to_the_other_commits(run: Run, root: SmallRoot) -> None:
    root.change(f"{root.log.state.commits[5].folder}/__0_0.distcp", b"")
    root.store.write(f"{root.log.state.commits[1].folder}/notes.txt", [b"mine"])
    result = run("verify", root.url, 15, 10)
    assert result.exit_code == 1
    assert "3 objects" in result.stdout.splitlines()[-1]
    assert "notes.txt isn't an object of this commit" in result.stdout
    assert run("verify", root.url, 10).exit_code == 0


def test_what_was_deleted_while_it_was_verified_is_not_bad(
    run: Run, root: SmallRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overtaken(store: Store, commit: CommitRecord, **options: Any) -> CommitFindings:
        root.log.delete(root.claim, lambda state: [commit.slot])
        for stat in store.list(commit.folder):
            store.delete(stat.path)
        return verify_commit(store, commit, **options)

    monkeypatch.setattr("stepkeeper.cli.verify.verify_commit", overtaken)
    result = run("verify", root.url, 15)
    assert (result.exit_code, result.stdout) == (0, "step 15 (sequence 5): was deleted while it was read\n")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("ls gs:/bucket", 2),
        ("ls gcs://bucket", 2),
        ("ls", 2),
        ("nothing", 2),
        ("ls memory://x --nothing", 2),
        ("verify memory://x 1 --all", 2),
        ("rm memory://x", 2),
        ("gc memory://x --pins --dry-run", 2),
        ("rm memory://x 5 --yes", 1),
    ],
)
def test_exit_codes(run: Run, arguments: str, code: int) -> None:
    result = run(*arguments.split())
    assert (result.exit_code, result.stdout) == (code, "")
    assert "Traceback" not in result.stderr


def test_a_store_that_refuses_is_one_line_and_code_3(run: Run, tmp_path: Path) -> None:
    entry = tmp_path / "root" / ".stepkeeper" / "log" / "00000000.json"
    entry.mkdir(parents=True)
    (entry / "x").write_text("")
    entry.with_name("00000001.json").write_text("{}")
    result = run("ls", (tmp_path / "root").as_uri())
    assert result.exit_code == 3
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("module", "command", "code", "says"),
    [
        ("typer", "ls", 1, "typer isn't installed: pip install 'stepkeeper[cli]'\n"),
        (
            "torch",
            "export",
            2,
            "this command needs torch, which isn't installed: pip install 'stepkeeper[cli,torch]'\n",
        ),
        ("torch", "path", 0, ""),
    ],
)
def test_without_an_extra_the_command_says_what_to_install(
    tmp_path: Path, module: str, command: str, code: int, says: str
) -> None:
    root = SmallRoot((tmp_path / "root").as_uri(), words="begin 10")
    absent = f"raise ModuleNotFoundError(\"No module named '{module}'\", name='{module}')"
    (tmp_path / f"{module}.py").write_text(absent)
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from stepkeeper.cli import main; main()"
    out = [str(tmp_path / "x.pt")] if command == "export" else []
    done = subprocess.run(
        [sys.executable, "-c", script, command, root.url, *out],
        capture_output=True, text=True, check=False, timeout=200
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (code, says and f"stepkeeper: {says}")
