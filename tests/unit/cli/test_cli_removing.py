"""rm and gc: what goes, what is refused, and what the next start of a job finds."""

import json
import re
import time
from collections.abc import Callable

import pytest
from typer.testing import Result

from stepkeeper.cli import write as module
from stepkeeper.errors import FencedError, OtherJobsRootError
from stepkeeper.log import DeleteEntry
from stepkeeper.retention.pins import Pin, put_pin, remove_pin
from stepkeeper_testing.checkpoints import SmallRoot
from stepkeeper_testing.pod import pod_identity

Run = Callable[..., Result]


ROOT = "begin 10 15 begin@1 20 30 *1"
"""Sequence 1, 4, 5 (steps 10, 20, 30) on the line, 1 verified; sequence 2 (step 15) on an abandoned branch."""


def sequences(root: SmallRoot) -> list[int]:
    return list(root.log.refresh().commits)


def folders(root: SmallRoot) -> set[str]:
    return {path.split("/")[0] for path in root.contents()} - {".stepkeeper"}


def test_the_deletion_is_in_the_log_before_data_goes(
    run: Run, root: SmallRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_short(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "sweep", cut_short)
        assert run("rm", root.url, 20, "--force", "--yes").exit_code == 130
    assert isinstance(root.log.entry(root.log.refresh().tail).body, DeleteEntry)
    assert folders(root) == {"10", "15", "20", "30"}
    assert "collected 1 folder, " in run("gc", root.url).stdout
    assert folders(root) == {"10", "15", "30"}


def test_a_root_that_a_job_may_be_writing_to_is_left_alone(run: Run, root: SmallRoot) -> None:
    before = root.contents()
    result = run("rm", root.url, 15, "--yes")
    assert (result.exit_code, result.stdout) == (4, "")
    assert "claim 3 of default/lm may still be writing" in result.stderr
    assert root.contents() == before
    root.save(40)


def test_a_job_that_writes_meanwhile_is_not_fenced_even_by_force(
    run: Run, root: SmallRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_check_proof", lambda *_: root.save(40))
    result = run("rm", root.url, 15, "--force", "--yes")
    assert result.exit_code == 4
    assert "slot 7 was written just now: a job is saving here" in result.stderr
    root.save(50)


def test_the_claim_of_this_command_is_over_with_it_the_stale_job_stops_and_its_next_start_goes_on(
    run: Run, root: SmallRoot
) -> None:
    assert run("rm", root.url, 15, "--force", "--yes").exit_code == 0
    assert run("rm", root.url, 20, "--yes").exit_code == 0
    assert sequences(root) == [1, 5]
    with pytest.raises(FencedError, match="claim 3 is stale"):
        root.save(40)
    with pytest.raises(OtherJobsRootError, match="default/lm"):
        root.log.begin(pod_identity(job="another", job_uid="uid-2"))
    root.play("begin")
    assert root.log.state.head == 5
    root.save(40)


@pytest.mark.parametrize(
    ("which", "code", "why"),
    [
        (["--sequence", 5, "--force", "--yes"], 4, "is the latest commit"),
        (["--sequence", 1, "--force", "--yes"], 4, "is the newest commit on the latest line that was ever"),
        ([20, "--force", "--yes"], 4, "select one with --sequence: 4, 7"),
        ([15, "--force"], 4, "--yes"),
        ([15, "--force", "--json"], 4, "--yes"),
    ],
)
def test_what_a_restore_needs_is_not_removed(
    run: Run, root: SmallRoot, which: list[str | int], code: int, why: str
) -> None:
    if 20 in which:
        root.play("20")
    before = root.contents()
    result = run("rm", root.url, *which)
    assert result.exit_code == code
    assert why in result.stderr
    assert root.contents() == before


def test_where_nothing_was_restored_the_latest_is_read_first(run: Run, url: str) -> None:
    root = SmallRoot(url, words="begin 10 20")
    path = f"{root.log.state.commits[2].folder}/__0_0.distcp"
    good = root.store.read(path)
    root.change(path, b"x" + good[1:])
    result = run("rm", url, 10, "--force", "--yes")
    assert result.exit_code == 4
    assert "the latest commit, step 20, is bad" in result.stderr
    assert sequences(root) == [1, 2]
    root.change(path, good)
    assert run("rm", url, 10, "--force", "--yes").exit_code == 0
    assert sequences(root) == [2]


def test_pinned_data_waits_for_a_collection(run: Run, root: SmallRoot) -> None:
    pin = Pin(slot=2, nonce="a" * 32, holder="ml/eval-3", reason="an evaluation")
    put_pin(root.store, pin)
    found = json.loads(run("rm", root.url, 15, "--force", "--yes", "--json").stdout)
    assert (found["deleted"][0]["sequence"], found["pinned"]) == (2, [2])
    assert "15" in folders(root)
    assert json.loads(run("gc", root.url, "--json").stdout)["pinned"][0]["sequence"] == 2
    remove_pin(root.store, pin)
    assert run("gc", root.url).stdout.endswith("; 0 pinned\n")
    assert "15" not in folders(root)


def test_pins_are_listed_with_their_holders(run: Run, root: SmallRoot) -> None:
    assert run("gc", root.url, "--pins").stdout == "no pins: no data is protected from deletion\n"
    put_pin(
        root.store, Pin(slot=5, nonce="b" * 32, holder="follow by 7", host="eval-0", seen=3, reason="follow")
    )
    put_pin(root.store, Pin(slot=2, nonce="a" * 32, holder="ml/fork"))
    root.store.write(f".stepkeeper/pins/00000009-{'c' * 32}", [b"{}"])
    header, *lines = run("gc", root.url, "--pins").stdout.splitlines()
    assert header.split() == ["NAME", "SEQUENCE", "STEP", "HOLDER", "HOST", "RENEWED", "LEASE", "REASON"]
    fork, follower, unread = (re.split(" {2,}", line.rstrip()) for line in lines)
    name = f"00000002-{'a' * 32}"
    assert fork == [name, "2", "15", "ml/fork", "-", fork[5], "none", "-"]
    assert follower[1:5] == ["5", "30", "follow by 7", "eval-0"]
    assert follower[6:] == [f"current, {root.log.refresh().tail - 3} entries behind", "follow"]
    assert unread[2:4] == ["deleted", "an unreadable holder"]
    documents = json.loads(run("gc", root.url, "--pins", "--json").stdout)["pins"]
    assert [each["lease"] for each in documents] == ["none", "current", "none"]
    renewed_unix_s = documents[1].pop("renewed_unix_s")
    assert abs(time.time() - renewed_unix_s) < 60
    assert documents[1] == {
        "name": f"00000005-{'b' * 32}", "sequence": 5, "step": 30, "holder": "follow by 7", "host": "eval-0",
        "seen": 3, "lease": "current", "reason": "follow", "nonce": "b" * 32
    }  # fmt: skip


def test_a_pin_whose_lease_is_over_is_listed_so_and_goes_with_a_collection(
    run: Run, root: SmallRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whatever the store says of the three commits of the line: they are a lease apart.
    monkeypatch.setattr("stepkeeper.retention.leases.LEASE_S", 0.0)
    root.play("*1 *4 *5")
    pin = Pin(slot=2, nonce="a" * 32, holder="ml/eval-3", seen=0)
    put_pin(root.store, pin)
    assert run("gc", root.url, "--pins").stdout.splitlines()[1].rstrip().endswith(" over   -")
    assert json.loads(run("gc", root.url, "--pins", "--json").stdout)["pins"][0]["lease"] == "over"
    assert json.loads(run("gc", root.url, "--dry-run", "--json").stdout)["pins_over"] == [pin.path]
    assert f"collected {pin.path}: this pin was not renewed for a whole lease\n" in run("gc", root.url).stdout
    assert json.loads(run("gc", root.url, "--pins", "--json").stdout)["pins"] == []


def test_one_pin_is_removed_by_its_name(run: Run, root: SmallRoot) -> None:
    mine = Pin(slot=2, nonce="a" * 32, holder="ml/eval-3")
    names = [mine.name.text, f"00000005-{'b' * 32}"]
    put_pin(root.store, mine)
    for seen in (5, 6):
        put_pin(root.store, Pin(slot=5, nonce="b" * 32, holder="follow by 7", seen=seen))
    refused = run("gc", root.url, "--pins", "--remove", "00000002-b")
    assert refused.exit_code == 1
    assert f"has no pin '00000002-b'; its pins: {', '.join(names)}" in refused.stderr
    run("rm", root.url, 15, "--force", "--yes")
    removed = run("gc", root.url, "--pins", "--remove", mine.name.text)
    assert removed.stdout == f"removed pin {mine.name.text} of ml/eval-3; the next gc deletes its data\n"
    assert "collected 15/" in run("gc", root.url).stdout
    found = json.loads(run("gc", root.url, "--pins", "--remove", names[1], "--json").stdout)
    assert found["removed"]["holder"] == "follow by 7"
    assert run("gc", root.url, "--pins", "--remove", names[1]).exit_code == 1
    assert not [path for path in root.contents() if path.startswith(".stepkeeper/pins")]
    assert run("gc", root.url, "--remove", mine.name.text).exit_code == 2


def test_gc_takes_what_earlier_claims_left_and_only_that(run: Run, root: SmallRoot) -> None:
    before = root.contents()
    left, over = root.give_up(60), f".stepkeeper/probes/00000000-{'a' * 32}"
    assert "collected 0 folders" in run("gc", root.url).stdout
    root.play("begin")
    root.store.write(over, [b"x"])
    mine = root.give_up(70)
    found = json.loads(run("gc", root.url, "--dry-run", "--json").stdout)
    assert [each["folder"] for each in found["collected"]] == [left]
    assert found["remnants"] == [over]
    assert any(path.startswith(left) for path in root.contents())
    said = run("gc", root.url).stdout
    assert f"collected {left}: 1 object, " in said
    assert f"collected {over}: left by a process that was killed\n" in said
    assert over not in root.contents()
    kept = {path for path in root.contents() if not path.startswith((".stepkeeper", mine))}
    assert kept == {path for path in before if not path.startswith(".stepkeeper")}
    root.save(80)
