"""repair: what it prints, when it refuses, and what the other commands say of a log before and after."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from typer.testing import Result

from stepkeeper.errors import FencedError
from stepkeeper.log.tail import slot_path
from stepkeeper_testing.checkpoints import SmallRoot
from stepkeeper_testing.memory import MemoryStore

Run = Callable[..., Result]


ROOT = "begin 10 20 begin 30"
"""Sequences 1, 2 and 4: steps 10, 20 and 30. Slot 3 is the claim of a second start."""


def damage(root: SmallRoot, slot: int, data: bytes | None = b"") -> None:
    root.change(slot_path(slot), data)


def let_time_pass(root: SmallRoot, seconds: int) -> None:
    """Let all that is in the root be older."""
    then = time.time() - seconds
    if isinstance(root.store, MemoryStore):
        times_unix_s = root.store.bucket.times_unix_s
        times_unix_s |= dict.fromkeys(times_unix_s, then)
        return
    for path in Path(unquote(urlsplit(root.url).path)).rglob("*"):
        os.utime(path, (then, then))


def commits(run: Run, root: SmallRoot, *options: str) -> list[dict[str, object]]:
    return list(json.loads(run("ls", *options, root.url, "--json").stdout)["commits"])


@pytest.mark.parametrize("command", ["ls", "verify", "show", "path", "gc"])
def test_a_command_that_meets_a_damaged_entry_names_the_one_that_repairs_it(
    run: Run, root: SmallRoot, command: str
) -> None:
    damage(root, 4)
    result = run(command, root.url)
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"slot 4 of the log of {root.url} is not what was written: it is empty" in result.stderr
    assert f"stepkeeper repair {root.url}" in result.stderr


def test_without_yes_it_only_tells(run: Run, root: SmallRoot) -> None:
    damage(root, 4)
    root.give_up(40)
    stray = root.log.state.commits[2].folder.replace("20/0-", "20/3-")
    root.change(f"{stray}/manifest.0.json", b"{}")
    before = root.contents()
    result = run("repair", root.url)
    assert result.exit_code == 1
    for line, (first, *parts) in zip(
        result.stdout.splitlines(),
        [
            ("damaged   ", "/.stepkeeper/log/00000004.json", "it is empty"),
            ("kept      2 commits: ", "step 10 (sequence 1), step 20 (sequence 2)"),
            ("found     step 30 (sequence 4)", "counts as a commit"),
            (f"aside     step 20 (sequence 5) in {stray}, 2 B: ", "quarantined"),
            ("lost      1 save", "without rank 0's manifest"),
            ("latest    step 30 (sequence 4)",),
            ("would     mark slots 5 as lost, and append slot 6",),
        ],
        strict=True,
    ):
        assert line.startswith(first)
        assert all(part in line for part in parts), line
    assert "stop the job and pass --yes --force" in result.stderr
    assert root.contents() == before


def test_a_healthy_log_and_an_empty_root_need_none(run: Run, root: SmallRoot, tmp_path: Path) -> None:
    damage(root, 1)
    before = root.contents()
    result = run("repair", root.url, "--yes")
    assert (result.exit_code, "nothing to repair" in result.stdout) == (0, True)
    assert root.contents() == before
    assert run("verify", "--all", root.url).exit_code == 0
    assert run("repair", tmp_path).exit_code == 0


@pytest.mark.parametrize(
    ("written", "says"),
    [
        pytest.param("now", "a job may still be saving to {url}", id="just now"),
        pytest.param("by a slow clock", "a job may still be saving to {url}", id="the store's clock counts"),
        pytest.param(
            "never", "the store doesn't report when it was last written", id="a store without times"
        ),
        pytest.param("long ago", "", id="an hour ago"),
    ],
)
def test_a_root_that_a_job_may_be_saving_to_is_not_repaired(
    run: Run, root: SmallRoot, monkeypatch: pytest.MonkeyPatch, written: str, says: str
) -> None:
    root.play("40")
    damage(root, 4)
    now, before = time.time, root.contents()
    if written == "by a slow clock":
        monkeypatch.setattr(time, "time", lambda: now() + 900)
    elif written == "long ago":
        let_time_pass(root, 3600)
    elif written == "never":
        if not isinstance(root.store, MemoryStore):
            pytest.skip("folders tell times")
        root.store.bucket.times_unix_s.clear()
    result = run("repair", root.url, "--yes")
    if written == "long ago":
        assert result.exit_code == 0, result.output
        assert "found     step 30 (sequence 4), whole by its manifests" in result.stdout
        assert result.stdout.splitlines()[-1].startswith("repaired  append slot 6")
        return
    assert (result.exit_code, result.stdout) == (4, "")
    assert says.format(url=root.url) in result.stderr
    assert root.contents() == before, "a probe is gone, too"
    root.save(50)


def test_all_commands_work_afterwards(run: Run, root: SmallRoot) -> None:
    root.play("40 -1")
    head = root.log.state.head
    damage(root, 3)
    damage(root, 4, b"{}")
    document = json.loads(run("repair", root.url, "--yes", "--force", "--json").stdout)
    assert (document["needed"], document["repaired"], document["slot"]) == (True, True, 7)
    assert [each["step"] for each in document["live"]] == [20, 30, 40]
    assert [each["slot"] for each in document["damaged"]] == [3, 4]
    assert [each["step"] for each in document["found"]] == [30]
    with pytest.raises(FencedError):
        root.save(50)
    listed = [each["step"] for each in commits(run, root, "--all") if each["sequence"] is not None]
    assert listed[:3] == [40, 30, 20]
    for command in (["verify", "--all"], ["doctor"], ["gc"], ["repair"]):
        assert run(*command, root.url).exit_code == 0
    assert run("show", root.url, 30).stdout.splitlines()[0].split() == ["step:", "30"]
    root.play("begin")
    assert root.log.state.head == head
    root.play("60")
    assert run("verify", "--all", root.url).exit_code == 0


def test_what_is_kept_aside_is_listed_verified_and_removed(run: Run, root: SmallRoot) -> None:
    damage(root, 4)
    root.change(f"{root.log.state.commits[4].folder}/__0_0.distcp", b"")
    assert run("repair", root.url, "--yes", "--force").exit_code == 0
    listed = commits(run, root, "--all")
    assert [(each["sequence"], each["state"]) for each in listed[:2]] == [(5, "quarantined"), (2, "latest")]
    assert run("verify", root.url, "--sequence", 5).exit_code == 1
    # The last claim is this command's own: it is over.
    assert run("rm", root.url, "--sequence", 5, "--yes").exit_code == 0
    assert run("verify", "--all", root.url).exit_code == 0


def test_gaps_are_marked_and_make_no_commit_younger(run: Run, root: SmallRoot) -> None:
    let_time_pass(root, 7200)
    damage(root, 0, None)
    damage(root, 1, None)
    damage(root, 2, root.store.read(slot_path(2)))
    assert "would     mark slots 0, 1 as lost, and append slot 5" in run("repair", root.url).stdout
    assert run("repair", root.url, "--yes", "--force").exit_code == 0
    assert run("doctor", root.url).exit_code == 0
    times_unix_s = [each["time_unix_s"] for each in commits(run, root, "--all")]
    assert len(times_unix_s) == 3
    assert all(isinstance(each, float | int) and time.time() - each > 7000 for each in times_unix_s)
