"""doctor: what it finds in the log, the store and a bucket's settings."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import Result

from stepkeeper.cli.doctor.bucket import judge_bucket
from stepkeeper.cli.doctor.probing import probe_store
from stepkeeper.errors import NotExclusiveError, StorageError, TransientStorageError
from stepkeeper.retention.pins import Pin, put_pin
from stepkeeper.storage.memory import MemoryStore
from stepkeeper.storage.retry import Patience
from stepkeeper_testing.checkpoints import SmallRoot

Run = Callable[..., Result]
IMPATIENT = Patience(total_s=0, sleep=lambda _: None)


@pytest.fixture
def root(url: str) -> SmallRoot:
    root = SmallRoot(url)
    root.begin()
    for step in (10, 20, 30):
        root.save(step)
    return root


def verdicts(result: Result) -> dict[str, str]:
    return {each["check"]: each["verdict"] for each in json.loads(result.stdout)["findings"]}


WRITING = ("put", "read", "list", "conditional-write", "delete")


def test_a_good_root(run: Run, root: SmallRoot) -> None:
    before = root.contents()
    result = run("doctor", root.url, "--throughput", 1, "--json")
    assert result.exit_code == 0
    checks = ("log", "pins", "latest", *WRITING, "throughput")
    assert verdicts(result) == dict.fromkeys(checks, "ok")
    said = run("doctor", root.url).stdout
    assert "OK      log: 4 entries without a gap" in said
    assert f"-> stepkeeper verify {root.store.uri} reads every block" in said
    assert root.contents() == before


def test_read_only_puts_nothing(run: Run, root: SmallRoot) -> None:
    assert set(verdicts(run("doctor", root.url, "--read-only", "--json"))) == {"log", "pins", "latest"}


@pytest.mark.parametrize("slot", [0, 1, 2])
def test_a_gap(run: Run, root: SmallRoot, slot: int) -> None:
    root.change(f".stepkeeper/log/{slot:08d}.json", None)
    result = run("doctor", root.url)
    assert result.exit_code == 1
    assert f"{slot:08d}.json is gone" in result.stdout.splitlines()[0]
    assert result.stdout.splitlines()[1].startswith("        -> put the slot back")


def test_an_entry_of_another_format(run: Run, root: SmallRoot) -> None:
    root.change(".stepkeeper/log/00000003.json", b'{"format": 99}')
    result = run("doctor", root.url, "--json")
    assert (result.exit_code, verdicts(result)["log"]) == (1, "bad")


def test_a_latest_commit_without_its_data(run: Run, root: SmallRoot) -> None:
    root.change(f"{root.log.state.commits[3].folder}/__0_0.distcp", None)
    result = run("doctor", root.url, "--json")
    assert (result.exit_code, verdicts(result)["latest"]) == (1, "bad")


def test_pins_of_what_is_gone(run: Run, root: SmallRoot) -> None:
    put_pin(root.store, Pin(slot=1, nonce="a" * 32, holder="an evaluation"))
    assert verdicts(run("doctor", root.url, "--json"))["pins"] == "ok"
    root.log.delete(root.claim, lambda state: [1])
    result = run("doctor", root.url, "--json")
    assert (result.exit_code, verdicts(result)["pins"]) == (0, "warn")
    root.store.write(f".stepkeeper/pins/00000002-{'b' * 32}", [b"{}"])
    assert verdicts(run("doctor", root.url, "--json"))["pins"] == "warn"


def refusing(operation: str, error: Exception) -> MemoryStore:
    def hook(moment: str, done: str, path: str) -> None:
        if (moment, done) == ("before", operation):
            raise error

    return MemoryStore(hook=hook)


@pytest.mark.parametrize(
    ("operation", "bad"),
    [
        ("put_if_absent", {"put"}),
        ("read", {"read", "conditional-write", "delete"}),
        ("list", {"list"}),
        ("delete", {"conditional-write", "delete"}),
    ],
)
def test_what_is_not_allowed(operation: str, bad: set[str]) -> None:
    findings = probe_store(refusing(operation, StorageError("not allowed")), IMPATIENT)
    assert {finding.check for finding in findings if finding.verdict == "bad"} == bad
    assert all(finding.todo for finding in findings if finding.verdict == "bad")


def test_no_answer_is_no_finding() -> None:
    with pytest.raises(TransientStorageError):
        probe_store(refusing("list", TransientStorageError("503")), IMPATIENT)


def test_a_store_where_two_creates_win(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()

    def overwriting(path: str, data: bytes) -> bool:
        store.bucket.objects[path] = data
        return True

    monkeypatch.setattr(store, "put_if_absent", overwriting)
    (bad,) = [finding for finding in probe_store(store, IMPATIENT) if finding.verdict == "bad"]
    assert (bad.check, bad.says) == (
        "conditional-write", "of 16 creates of one name at the same time 16 won"
    )  # fmt: skip
    assert store.bucket.objects == {}


def test_a_store_that_says_itself_that_two_could_win() -> None:
    (finding,) = probe_store(refusing("put_if_absent", NotExclusiveError("both won")), IMPATIENT)
    assert (finding.check, finding.verdict, finding.says) == ("conditional-write", "bad", "both won")


def rule(action: str, **condition: Any) -> dict[str, Any]:
    return {
        "lifecycle": {
            "rule": [{"action": {"type": action, "storageClass": "NEARLINE"}, "condition": condition}]
        }
    }


@pytest.mark.parametrize(
    ("settings", "check", "verdict"),
    [
        ({}, "lifecycle", "ok"),
        (rule("Delete", age=30), "lifecycle", "bad"),
        (rule("Delete", age=30, matchesPrefix=["runs/"]), "lifecycle", "bad"),
        (rule("Delete", age=30, matchesPrefix=["runs/lm/.stepkeeper"]), "lifecycle", "bad"),
        (rule("Delete", age=30, matchesPrefix=["tmp/", "runs/lm2"]), "lifecycle", "ok"),
        (rule("Delete", age=30, matchesSuffix=[".log"]), "lifecycle", "ok"),
        (rule("Delete", age=30, matchesSuffix=[".log", ".json"]), "lifecycle", "bad"),
        (rule("Delete", isLive=False, age=1), "lifecycle", "ok"),
        (rule("Delete", numNewerVersions=2), "lifecycle", "ok"),
        (rule("SetStorageClass", age=30), "lifecycle", "warn"),
        (rule("AbortIncompleteMultipartUpload", age=7), "lifecycle", "ok"),
        ({"softDeletePolicy": {"retentionDurationSeconds": "604800"}}, "soft-delete", "warn"),
        ({"softDeletePolicy": {"retentionDurationSeconds": "0"}}, "soft-delete", "ok"),
        ({"versioning": {"enabled": True}}, "versioning", "warn"),
        ({"retentionPolicy": {"retentionPeriod": "86400"}}, "retention-policy", "warn"),
        ({"defaultEventBasedHold": True}, "retention-policy", "warn"),
        ({"storageClass": "ARCHIVE", "location": "EU"}, "storage-class", "warn"),
        ({"storageClass": "STANDARD", "location": "EU"}, "storage-class", "ok"),
    ],
)
def test_what_a_bucket_is_set_to(settings: dict[str, Any], check: str, verdict: str) -> None:
    findings = {finding.check: finding for finding in judge_bucket(settings, "runs/lm")}
    assert findings[check].verdict == verdict
    assert findings[check].todo or verdict == "ok"
    others = {found.verdict for name, found in findings.items() if name != check}
    assert others == {"ok"}


def test_a_gap_that_opening_a_long_log_does_not_meet(
    run: Run, root: SmallRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepkeeper.log.tail.PAGE", 4)
    while root.log.state.tail < 40:
        root.log.void(root.claim, "nothing to save", "10/0-x")
    root.change(".stepkeeper/log/00000015.json", None)
    result = run("doctor", root.url)
    assert result.exit_code == 1
    assert "00000015.json" in result.stdout.splitlines()[0]
