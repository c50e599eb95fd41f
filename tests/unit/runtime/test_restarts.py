"""Test how often a training was disrupted, by its root's log, and what the policy makes of that."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from stepkeeper.errors import MissingObjectError
from stepkeeper.log import Entry
from stepkeeper.log.restarts import RestartHistory, read_restart_history
from stepkeeper.log.store_times import StoreTimes
from stepkeeper.log.tail import slot_path
from stepkeeper.policy.save import Auto, Disruptions, SaveCost
from stepkeeper.training.disruptions import DisruptionHistory
from stepkeeper_testing.checkpoints import SmallRoot
from stepkeeper_testing.pod import pod_identity

DAY_S = 86400
COST = SaveCost(stall_s=1.0, duration_s=2.0)


@pytest.fixture
def root(tmp_path: Path) -> SmallRoot:
    return SmallRoot((tmp_path / "root").as_uri())


def by_hand(root: SmallRoot, **how: object) -> None:
    """A process that no operator started claims the root."""
    root.claim = root.log.begin(**how)  # type: ignore[arg-type]  # each case gives what begin takes


def put_at(root: SmallRoot, slot: int, time_unix_s: float) -> None:
    os.utime(Path(root.url.removeprefix("file://"), slot_path(slot)), (time_unix_s, time_unix_s))


def past(root: SmallRoot) -> RestartHistory | None:
    return read_restart_history(root.log.entry, StoreTimes(root.store), root.claim.slot)


def restarts(root: SmallRoot) -> int:
    found = past(root)
    assert found is not None
    return found.restarts


def interval_s(known: Disruptions) -> float:
    return Auto(least_s=1.0, most_s=1e9).interval_s(COST, known)


def test_a_first_start_has_no_past_and_learns_from_each_hour(
    root: SmallRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.begin()
    found = past(root)
    assert found == RestartHistory(restarts=0, over_s=0)
    now_s = 100.0
    monkeypatch.setattr("stepkeeper.training.disruptions.time", SimpleNamespace(monotonic=lambda: now_s))
    experience = DisruptionHistory()
    assert interval_s(experience.count_until_now(0, found)) == interval_s(Disruptions())
    now_s += 10 * DAY_S
    calm = experience.count_until_now(0, found)
    assert calm == Disruptions(count=0, over_s=10 * DAY_S)
    assert interval_s(calm) > 3 * interval_s(Disruptions())
    assert experience.count_until_now(1, found).over_s == 0, (
        "another claim, whose past has the time before it"
    )


@pytest.mark.parametrize("begin", [SmallRoot.begin, by_hand], ids=["operator", "by hand"])
def test_restarts_twenty_times_a_day_make_saves_come_sooner(
    root: SmallRoot, begin: Callable[[SmallRoot], None]
) -> None:
    """Test this with an operator that counts and without. The root is ten days old, and was calm at first."""
    for attempt in range(21):
        if begin is by_hand:
            by_hand(root)
        else:
            root.begin(attempt)
        put_at(root, root.claim.slot, 10 * DAY_S + DAY_S * attempt / 20)
        put_at(root, root.save(attempt).slot, 10 * DAY_S + DAY_S * attempt / 20)
    put_at(root, 0, 1)
    found = past(root)
    assert found == RestartHistory(restarts=16, over_s=16 * DAY_S // 20)
    known = DisruptionHistory().count_until_now(root.claim.slot, found)
    assert interval_s(known) < interval_s(Disruptions()) / 2


def test_all_jobsets_of_a_job_count_and_another_jobs_starts_do_not(root: SmallRoot) -> None:
    by_hand(root)
    root.save(1)
    root.claim = root.log.begin(pod_identity(), take_over=True)
    assert restarts(root) == 0, "a root taken over has no past of ours"
    root.save(2)
    for number, attempt in ((0, 1), (1, 0), (1, 1), (2, 0)):
        root.claim = root.log.begin(pod_identity(jobset_number=number, restart_attempt=attempt))
        root.save(3)
    assert restarts(root) == 4
    for slot in range(root.log.open().tail + 1):
        put_at(root, slot, 1000.0 * slot)
    assert past(root) == RestartHistory(restarts=4, over_s=1000 * (root.claim.slot - 2))


@pytest.mark.parametrize(
    "begin",
    [
        lambda root, first: by_hand(root, base=first),
        lambda root, first: by_hand(root, base=first, after=root.claim),
        lambda root, first: by_hand(root, scratch=True),
    ],
    ids=["goes back", "another claim of one process", "begins anew"],
)
def test_what_was_chosen_is_no_disruption(root: SmallRoot, begin: Callable[[SmallRoot, int], None]) -> None:
    by_hand(root)
    first = root.save(1).slot
    root.save(2)
    begin(root, first)
    assert restarts(root) == 0
    root.save(3)
    by_hand(root)
    assert restarts(root) == 1
    by_hand(root)
    assert restarts(root) == 2, "also where nothing was committed in between"


def test_several_claims_of_one_start_of_a_job_are_none(root: SmallRoot) -> None:
    root.begin(1)
    root.save(1)
    root.begin(1)
    assert restarts(root) == 0


def test_restarts_without_times_say_nothing(root: SmallRoot, caplog: pytest.LogCaptureFixture) -> None:
    assert DisruptionHistory().count_until_now(4, RestartHistory(restarts=9, over_s=None)) == Disruptions()
    root.begin(0)
    root.begin(1)

    def gone(slot: int) -> Entry:
        raise MissingObjectError(2, f"no entry {slot}")

    assert read_restart_history(gone, StoreTimes(root.store), root.claim.slot) is None
    assert "how often this training was restarted" in caplog.text
