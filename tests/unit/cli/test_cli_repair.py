"""repair: what it prints, when it refuses, and what the other commands say of a log before and after."""

import json
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from typer.testing import Result

from stepkeeper.errors import FencedError
from stepkeeper.log.tail import slot_path
from stepkeeper.storage.memory import MemoryStore
from stepkeeper_testing.checkpoints import SmallRoot

Run = Callable[..., Result]


@pytest.fixture
def root(url: str) -> SmallRoot:
    """Sequences 1, 2 and 4: steps 10, 20 and 30. Slot 3 is the claim of a second start."""
    root = SmallRoot(url)
    root.begin()
    root.save(10)
    root.save(20)
    root.begin(1)
    root.save(30)
    return root


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


@pytest.mark.parametrize("command", ["ls", "verify", "show", "path", "gc", "watch"])
def test_a_command_that_meets_a_damaged_entry_names_what_mends_it(
    run: Run, root: SmallRoot, command: str
) -> None:
    damage(root, 4)
    result = run(command, root.url)
    assert (result.exit_code, result.stdout) == (1, "")
    assert (
        f"slot 4 of the log of {root.url} is not what was written: it is empty (read 3 times)"
        in result.stderr
    )
    assert f"stepkeeper repair {root.url}" in result.stderr


@pytest.mark.parametrize("data", [b"", b"{}", None])
def test_doctor_proposes_it(run: Run, root: SmallRoot, data: bytes | None) -> None:
    damage(root, 3 if data is None else 4, data)
    findings = json.loads(run("doctor", root.url, "--json").stdout)["findings"]
    (log,) = (each for each in findings if each["check"] == "log")
    assert log["verdict"] == "bad"
    assert log["todo"].endswith(f"stepkeeper repair {root.url}")


def test_doctor_proposes_verify_where_data_is_gone(run: Run, root: SmallRoot) -> None:
    root.change(f"{root.log.state.commits[4].folder}/__0_0.distcp", None)
    assert f"-> stepkeeper verify {root.url} names the objects" in run("doctor", root.url).stdout


def test_without_yes_it_only_tells(run: Run, root: SmallRoot) -> None:
    damage(root, 4)
    root.give_up(40)
    stray = root.log.state.commits[2].folder.replace("20/0-", "20/3-")
    root.change(f"{stray}/manifest.0.json", b"{}")
    before = root.contents()
    result = run("repair", root.url)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0].startswith("damaged   ")
    assert lines[0].endswith("/.stepkeeper/log/00000004.json is not what was written: it is empty")
    assert lines[1] == "kept      2 commits: step 10 (sequence 1), step 20 (sequence 2)"
    assert lines[2] == "found     step 30 (sequence 4), whole by its manifests: it counts as a commit"
    assert lines[3].startswith(f"aside     step 20 (sequence 5) in {stray}, 2 B: ")
    assert lines[3].endswith("; quarantined, so that its data stays")
    assert (
        lines[4] == "lost      1 save without rank 0's manifest: the next start deletes what is there of it"
    )
    assert lines[5] == "latest    step 30 (sequence 4)"
    assert lines[6].startswith("would     mark slots 5 as lost, and append slot 6, a claim of the root")
    assert "stop the job and say --yes --force" in result.stderr
    assert root.contents() == before


def test_a_healthy_log_needs_none(run: Run, root: SmallRoot) -> None:
    damage(root, 1)
    before = root.contents()
    result = run("repair", root.url, "--yes")
    assert result.exit_code == 0
    assert result.stdout == "nothing that a start needs is damaged: 5 entries, nothing to repair\n"
    assert root.contents() == before
    assert run("verify", "--all", root.url).exit_code == 0


def test_an_empty_root_needs_none(run: Run, url: str, tmp_path: Path) -> None:
    (tmp_path / "a root").mkdir()
    assert run("repair", url).exit_code == 0


def test_it_is_refused_while_a_job_may_be_saving(run: Run, root: SmallRoot) -> None:
    root.save(40)
    damage(root, 4)
    before = root.contents()
    result = run("repair", root.url, "--yes")
    assert (result.exit_code, result.stdout) == (4, "")
    assert f"a job may be saving to {root.url} still" in result.stderr
    assert root.contents() == before
    root.save(50)


def test_it_is_refused_where_the_store_tells_no_times(run: Run) -> None:
    root = SmallRoot(f"memory://{secrets.token_hex(8)}")
    assert isinstance(root.store, MemoryStore)
    root.begin()
    for step in (10, 20, 30, 40):
        root.save(step)
    damage(root, 4)
    root.store.bucket.times_unix_s.clear()
    result = run("repair", root.url, "--yes")
    assert (result.exit_code, result.stdout) == (4, "")
    assert "the store doesn't tell when it was written to" in result.stderr


def test_a_root_that_nothing_was_written_to_for_long_is_repaired(run: Run, root: SmallRoot) -> None:
    root.save(40)
    damage(root, 4)
    let_time_pass(root, 3600)
    result = run("repair", root.url, "--yes")
    assert result.exit_code == 0, result.output
    assert "found     step 30 (sequence 4), whole by its manifests" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("repaired  append slot 6")


def test_all_commands_work_afterwards(run: Run, root: SmallRoot) -> None:
    root.save(40)
    root.log.delete(root.claim, lambda state: [1])
    truth = root.log.state
    damage(root, 3)
    damage(root, 4, b"{}")
    document = json.loads(run("repair", root.url, "--yes", "--force", "--json").stdout)
    assert (document["needed"], document["repaired"], document["slot"]) == (True, True, 7)
    assert [each["step"] for each in document["live"]] == [20, 30, 40]
    assert [each["slot"] for each in document["damaged"]] == [3, 4]
    assert [each["step"] for each in document["found"]] == [30]
    with pytest.raises(FencedError):
        root.save(50)
    listed = json.loads(run("ls", "--all", root.url, "--json").stdout)
    assert [each["step"] for each in listed["commits"] if each["sequence"] is not None][:3] == [40, 30, 20]
    assert listed["claim"] == 7
    assert run("verify", "--all", root.url).exit_code == 0
    assert run("doctor", root.url).exit_code == 0
    assert run("show", root.url, 30).stdout.splitlines()[0].split() == ["step:", "30"]
    assert run("gc", root.url).exit_code == 0
    assert run("repair", root.url).exit_code == 0
    root.begin(2)
    assert root.log.state.head == truth.head
    root.save(60)
    assert run("verify", "--all", root.url).exit_code == 0


def test_what_is_kept_aside_is_listed_verified_and_removed(run: Run, root: SmallRoot) -> None:
    damage(root, 4)
    root.change(f"{root.log.state.commits[4].folder}/__0_0.distcp", b"")
    assert run("repair", root.url, "--yes", "--force").exit_code == 0
    listed = json.loads(run("ls", "--all", root.url, "--json").stdout)["commits"]
    assert [(each["sequence"], each["state"]) for each in listed[:2]] == [(5, "quarantined"), (2, "latest")]
    assert run("verify", root.url, "--sequence", 5).exit_code == 1
    # The last claim is this command's own: it is over.
    assert run("rm", root.url, "--sequence", 5, "--yes").exit_code == 0
    assert run("verify", "--all", root.url).exit_code == 0


def test_gaps_are_marked(run: Run, root: SmallRoot) -> None:
    damage(root, 0, None)
    damage(root, 1, None)
    assert "would     mark slots 0, 1 as lost, and append slot 5" in run("repair", root.url).stdout
    assert run("repair", root.url, "--yes", "--force").exit_code == 0
    assert run("doctor", root.url).exit_code == 0
    assert run("ls", "--all", root.url).exit_code == 0


def test_a_repaired_slot_makes_its_commit_no_younger(run: Run, root: SmallRoot) -> None:
    let_time_pass(root, 7200)
    damage(root, 1, None)
    entry = root.store.read(slot_path(2))
    damage(root, 2, entry)
    assert run("repair", root.url, "--yes", "--force").exit_code == 0
    ages_s = [
        time.time() - each["time_unix_s"]
        for each in json.loads(run("ls", root.url, "--json").stdout)["commits"]
    ]
    assert len(ages_s) == 3
    assert min(ages_s) > 7000
