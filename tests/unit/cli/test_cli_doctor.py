"""doctor: what it finds in the log, the store and a bucket's settings."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import Result

from stepkeeper.cli.doctor.bucket import judge_bucket
from stepkeeper.cli.doctor.probing import probe_store
from stepkeeper.errors import NotExclusiveError, StorageError, TransientStorageError
from stepkeeper.log.tail import slot_path
from stepkeeper.retention.pins import Pin, put_pin
from stepkeeper.storage.retry import Patience
from stepkeeper_testing.checkpoints import SmallRoot
from stepkeeper_testing.hooks import at
from stepkeeper_testing.memory import MemoryStore

Run = Callable[..., Result]
IMPATIENT = Patience(total_s=0, sleep=lambda _: None)
WRITING = ("put", "read", "list", "conditional-write", "delete")


ROOT = "begin 10 20 30"


def verdicts(result: Result) -> dict[str, str]:
    return {each["check"]: each["verdict"] for each in json.loads(result.stdout)["findings"]}


def test_a_good_root(run: Run, root: SmallRoot) -> None:
    before = root.contents()
    result = run("doctor", root.url, "--json")
    assert result.exit_code == 0
    assert verdicts(result) == dict.fromkeys(("log", "pins", "latest", *WRITING), "ok")
    said = run("doctor", root.url).stdout
    assert "OK      log: 4 entries without a gap" in said
    assert f"-> stepkeeper verify {root.store.uri} reads every block" in said
    assert root.contents() == before
    assert set(verdicts(run("doctor", root.url, "--read-only", "--json"))) == {"log", "pins", "latest"}


@pytest.mark.parametrize(
    ("path", "data", "check", "says", "todo"),
    [
        *((slot_path(slot), None, "log", f"{slot:08d}.json is gone", "restore it from") for slot in range(3)),
        (slot_path(2), None, "log", "00000002.json is gone", "stepkeeper repair {url}"),
        (slot_path(3), b"", "log", "it is empty", "stepkeeper repair {url}"),
        (slot_path(3), b"{}", "log", "00000003.json", "stepkeeper repair {url}"),
        (slot_path(3), b'{"format": 99}', "log", "has format 99", ""),
        ("{folder}/__0_0.distcp", None, "latest", "step 30", "stepkeeper verify {url} names the objects"),
    ],
)
def test_what_is_bad_is_named_with_what_to_do(
    run: Run, root: SmallRoot, path: str, data: bytes | None, check: str, says: str, todo: str
) -> None:
    root.change(path.format(folder=root.log.state.commits[3].folder), data)
    result = run("doctor", root.url, "--json")
    assert (result.exit_code, verdicts(result)[check]) == (1, "bad")
    (found,) = (each for each in json.loads(result.stdout)["findings"] if each["check"] == check)
    assert says in found["says"]
    assert todo.format(url=root.url) in found["todo"]
    assert f"-> {found['todo']}" in run("doctor", root.url).stdout


def test_pins_of_what_is_gone(run: Run, root: SmallRoot) -> None:
    put_pin(root.store, Pin(slot=1, nonce="a" * 32, holder="an evaluation"))
    assert verdicts(run("doctor", root.url, "--json"))["pins"] == "ok"
    root.play("-1")
    result = run("doctor", root.url, "--json")
    assert (result.exit_code, verdicts(result)["pins"]) == (0, "warn")
    root.store.write(f".stepkeeper/pins/00000002-{'b' * 32}", [b"{}"])
    assert verdicts(run("doctor", root.url, "--json"))["pins"] == "warn"


NOT_ALLOWED = StorageError("not allowed")


@pytest.mark.parametrize(
    ("operation", "error", "bad"),
    [
        ("put_if_absent", NOT_ALLOWED, {"put"}),
        ("read", NOT_ALLOWED, {"read", "conditional-write", "delete"}),
        ("list", NOT_ALLOWED, {"list", "conditional-write"}),
        ("delete", NOT_ALLOWED, {"conditional-write", "delete"}),
        ("put_if_absent", NotExclusiveError("both won"), {"conditional-write"}),
    ],
)
def test_what_is_not_allowed(operation: str, error: Exception, bad: set[str]) -> None:
    findings = probe_store(MemoryStore(hook=at(f"before {operation}", error)), IMPATIENT)
    assert {finding.check for finding in findings if finding.verdict == "bad"} == bad
    assert all(finding.todo for finding in findings if finding.verdict == "bad")


def test_no_answer_is_no_finding() -> None:
    with pytest.raises(TransientStorageError):
        probe_store(MemoryStore(hook=at("before list", TransientStorageError("503"))), IMPATIENT)


def test_a_store_where_two_creates_win(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()

    def overwriting(path: str, data: bytes) -> bool:
        store.bucket.objects[path] = data
        return True

    monkeypatch.setattr(store, "put_if_absent", overwriting)
    (bad,) = [finding for finding in probe_store(store, IMPATIENT) if finding.verdict == "bad"]
    assert (bad.check, "could both succeed" in bad.summary) == ("conditional-write", True)
    assert store.bucket.objects == {}


def rule(action: str, **condition: Any) -> dict[str, Any]:
    rule = {"action": {"type": action, "storageClass": "NEARLINE"}, "condition": condition}
    return {"lifecycle": {"rule": [rule]}}


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
    assert {found.verdict for name, found in findings.items() if name != check} == {"ok"}


def test_a_gap_that_opening_a_long_log_does_not_meet(
    run: Run, root: SmallRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepkeeper.log.tail.PAGE", 4)
    root.play("voidx37")
    root.change(slot_path(15), None)
    result = run("doctor", root.url)
    assert result.exit_code == 1
    assert "00000015.json" in result.stdout.splitlines()[0]
