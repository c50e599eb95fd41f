"""Test what a root's log shows: disruptions of a training, the age of objects, and steps of other writers."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from stepkeeper.errors import MissingObjectError, StorageError
from stepkeeper.log import Entry
from stepkeeper.log.foreign_steps import find_steps_below, find_steps_in
from stepkeeper.log.store_times import RestartHistory, StoreTimes, read_restart_history
from stepkeeper.log.tail import slot_path
from stepkeeper.policy.save import Auto, Disruptions, SaveCost
from stepkeeper.storage import ObjectStat
from stepkeeper.training.steps import DisruptionHistory
from stepkeeper_testing.checkpoints import SmallRoot
from stepkeeper_testing.hooks import at
from stepkeeper_testing.memory import MemoryStore
from stepkeeper_testing.pod import pod_identity

DAY_S = 86400
COST = SaveCost(stall_s=1.0, duration_s=2.0)


@pytest.fixture
def root(tmp_path: Path) -> SmallRoot:
    return SmallRoot((tmp_path / "root").as_uri())


def put_at(root: SmallRoot, path: str, time_unix_s: float) -> None:
    os.utime(Path(root.url.removeprefix("file://"), path), (time_unix_s, time_unix_s))


def past(root: SmallRoot) -> RestartHistory | None:
    return read_restart_history(root.log.entry, StoreTimes(root.store), root.claim.slot)


def restarts(root: SmallRoot) -> int:
    found = past(root)
    assert found is not None
    return found.restarts


def interval_s(known: Disruptions) -> float:
    return Auto(min_s=1.0, max_s=1e9).interval_s(COST, known)


def test_a_commit_is_as_old_as_its_manifest_and_asked_for_once(root: SmallRoot) -> None:
    root.begin()
    first, second = root.save(10), root.save(20)
    paths = [f"{record.folder}/{record.manifest.path}" for record in (first, second)]
    put_at(root, paths[0], 1000.5)
    put_at(root, paths[1], 2000.5)
    times = StoreTimes(root.store)
    assert times.of_commits([first]) == {first.slot: 1000.5}
    put_at(root, paths[0], 5000.0)
    assert times.of_commits([first, second]) == {first.slot: 1000.5, second.slot: 2000.5}
    assert StoreTimes(root.store).of_commits([first]) == {first.slot: 5000.0}


def test_where_the_store_says_nothing_nothing_is_known(caplog: pytest.LogCaptureFixture) -> None:
    root = SmallRoot()
    assert isinstance(root.store, MemoryStore)
    root.begin()
    record = root.save(10)
    root.store.bucket.times_unix_s.clear()
    assert StoreTimes(root.store).of_commits([record]) == {}
    assert StoreTimes(root.store).between_s(0, 0) is None
    refusing = MemoryStore(root.store.bucket, hook=at("before list", StorageError(13, "no listing")))
    assert StoreTimes(refusing).between_s(0, 0) is None
    assert "the training time of" in caplog.text
    with pytest.raises(StorageError):
        StoreTimes(refusing).of_commits([record])


def test_a_first_start_has_no_past_and_learns_from_each_hour(
    root: SmallRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.begin()
    found = past(root)
    assert found == RestartHistory(restarts=0, over_s=0)
    now_s = 100.0
    monkeypatch.setattr("stepkeeper.training.steps.time", SimpleNamespace(monotonic=lambda: now_s))
    experience = DisruptionHistory()
    assert interval_s(experience.count_until_now(0, found)) == interval_s(Disruptions())
    now_s += 10 * DAY_S
    calm = experience.count_until_now(0, found)
    assert calm == Disruptions(count=0, over_s=10 * DAY_S)
    assert interval_s(calm) > 3 * interval_s(Disruptions())
    assert experience.count_until_now(1, found).over_s == 0, "another claim's past has the time before it"


@pytest.mark.parametrize("by_hand", [False, True], ids=["operator", "by hand"])
def test_restarts_twenty_times_a_day_make_saves_come_sooner(root: SmallRoot, by_hand: bool) -> None:
    """The root is ten days old, and was calm at first."""
    for attempt in range(21):
        identity = None if by_hand else pod_identity(restart_attempt=attempt)
        root.claim = root.log.begin(identity)
        for slot in (root.claim.slot, root.save(attempt).slot):
            put_at(root, slot_path(slot), 10 * DAY_S + DAY_S * attempt / 20)
    put_at(root, slot_path(0), 1)
    found = past(root)
    assert found == RestartHistory(restarts=16, over_s=16 * DAY_S // 20)
    known = DisruptionHistory().count_until_now(root.claim.slot, found)
    assert interval_s(known) < interval_s(Disruptions()) / 2


def test_all_jobsets_of_a_job_count_and_another_jobs_starts_do_not(root: SmallRoot) -> None:
    root.claim = root.log.begin()
    root.save(1)
    root.claim = root.log.begin(pod_identity(), take_over=True)
    assert restarts(root) == 0, "a root taken over has no past of ours"
    root.save(2)
    for number, attempt in ((0, 1), (1, 0), (1, 1), (2, 0)):
        root.claim = root.log.begin(pod_identity(jobset_number=number, restart_attempt=attempt))
        root.save(3)
    assert restarts(root) == 4
    for slot in range(root.log.open().tail + 1):
        put_at(root, slot_path(slot), 1000.0 * slot)
    assert past(root) == RestartHistory(restarts=4, over_s=1000 * (root.claim.slot - 2))


@pytest.mark.parametrize(
    ("words", "n_restarts"),
    [
        pytest.param("begin 1 2 begin@1", 0, id="it went back"),
        pytest.param("begin 1 2 back@1", 0, id="another claim of one process"),
        pytest.param("begin 1 2 scratch", 0, id="begun from scratch"),
        pytest.param("begin 1 2 begin@1 3 begin", 1, id="after it went back"),
        pytest.param("begin 1 2 back@1 3 begin begin", 2, id="also where nothing was committed in between"),
    ],
)
def test_what_was_chosen_is_no_disruption(words: str, n_restarts: int) -> None:
    root = SmallRoot(words=words)
    assert restarts(root) == n_restarts


def test_restarts_without_times_say_nothing(root: SmallRoot, caplog: pytest.LogCaptureFixture) -> None:
    assert DisruptionHistory().count_until_now(4, RestartHistory(restarts=9, over_s=None)) == Disruptions()
    root.play("begin begin")

    def gone(slot: int) -> Entry:
        raise MissingObjectError(2, f"no entry {slot}")

    assert read_restart_history(gone, StoreTimes(root.store), root.claim.slot) is None
    assert "the number of restarts of this training is unknown" in caplog.text


NONCE = "a" * 32


def stats(*paths: str) -> list[ObjectStat]:
    return [ObjectStat(path=path, size_bytes=1) for path in paths]


def test_steps_are_found_by_the_names_that_writers_give_them() -> None:
    finished = ["100", "step-200", "step_250", "step260", "checkpoint-300", "global_step400", "iter_0000450"]
    found = find_steps_in(
        stats(
            *(f"{folder}/.metadata" for folder in (*finished, "500", "notes-600")),
            f"100/7-{NONCE}/.metadata",
            f"150/7-{NONCE}/.metadata",
            f"150/7-{NONCE}/__0_0.distcp",
            "checkpoint_350/__0_0.distcp",
            "700/notes.txt",
            "step-800/sub/__0_0.distcp",
            "900",
            ".stepkeeper/log/00000000.json",
        )
    )
    assert [each.folder for each in found if each.is_finished] == ["500", *reversed(finished)]
    assert [each.step for each in found] == [500, 450, 400, 350, 300, 260, 250, 200, 100]


def test_what_lies_below_a_line_is_what_it_went_on_from_and_all_that_is_older() -> None:
    found = find_steps_in(stats(*(f"{step}/.metadata" for step in (100, 200, 300, 400))))
    root = SmallRoot()
    assert len(find_steps_below(root.log.open(), lambda: found)) == 4
    root.play("begin?s300")
    assert len(find_steps_below(root.log.state, lambda: found)) == 4, "nothing is committed yet"
    root.play("301")
    assert [each.step for each in find_steps_below(root.log.state, lambda: found)] == [300, 200, 100]
    root.play("scratch 1")

    def nothing_to_find() -> tuple[()]:
        raise AssertionError("there can't be any")

    assert find_steps_below(root.log.state, nothing_to_find) == ()
