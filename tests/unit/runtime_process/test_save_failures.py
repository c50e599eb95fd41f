"""A save that failed is said once: by its own result, or by the next call if nobody has asked for that."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from stepkeeper import CheckpointManager
from stepkeeper.companion.messages import Committed
from stepkeeper.companion.supervisor import Companion
from stepkeeper.coordination.rank_group import RankGroup
from stepkeeper.errors import (
    CompanionLostError,
    DevicesFullError,
    FencedError,
    PeerLostError,
    SaveError,
    StepkeeperError,
)
from stepkeeper.save.job import SaveJob
from stepkeeper.save.request import SaveRequest
from stepkeeper.time_limits import TimeLimits
from stepkeeper_testing.saves import record_of

STATE = {"step": 1}
RECORD = record_of(1)


class Ends(list[BaseException | None]):
    """Decide how one save after the other ends."""

    def __call__(self, job: SaveJob, companion: Companion, rank_group: RankGroup) -> Committed:  # persist's
        end = self.pop(0)
        if end is not None:
            raise end
        return Committed(record=RECORD, uri="file:///root/1/x")


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Ends:
    found = Ends()
    monkeypatch.setattr("stepkeeper.save.pipeline.persist_save", found)
    monkeypatch.setattr("stepkeeper.coordination.root_check.RootProof.make", lambda _proof: None)
    return found


@pytest.fixture
def manager(tmp_path: Path) -> CheckpointManager:
    return CheckpointManager(str(tmp_path), 1)


@pytest.mark.parametrize("error", [SaveError, CompanionLostError])
def test_what_was_handled_does_not_end_the_training(
    manager: CheckpointManager, ends: Ends, error: type[StepkeeperError]
) -> None:
    ends += [error("no space")]
    manager.save_async(1, STATE)
    begun = manager._parts.saver.newest_save
    assert begun is not None
    with pytest.raises(error, match="no space"):
        begun.result()
    manager.close()


def test_a_failure_that_nobody_asked_for_is_raised_whatever_others_were_heard(
    manager: CheckpointManager, ends: Ends
) -> None:
    ends += [SaveError("no space"), SaveError("no answer")]
    with pytest.raises(SaveError, match="no space"):
        manager.save(1, STATE)
    heard = manager._parts.saver.newest_save
    manager.save_async(2, STATE)
    assert heard is not None
    with pytest.raises(SaveError, match="no space"):
        heard.result()
    with pytest.raises(SaveError, match="no answer"):
        manager.join()
    manager.close()


@pytest.mark.parametrize("error", [FencedError, PeerLostError])
def test_that_the_root_or_the_peers_are_lost_stays_true(
    manager: CheckpointManager, ends: Ends, error: type[StepkeeperError]
) -> None:
    ends += [error("it is over"), None]
    with pytest.raises(error):
        manager.save(1, STATE)
    with pytest.raises(error):
        manager.save(2, STATE)
    assert ends == [None]
    manager.close()


def test_of_several_ranks_one_that_asks_does_not_go_on_alone(manager: CheckpointManager, ends: Ends) -> None:
    vars(manager._parts.saver._pipeline)["_rank_group"] = SimpleNamespace(world_size=2, limits=TimeLimits())
    ends += [SaveError("no space"), SaveError("no answer"), None]
    manager.save_async(1, STATE)
    begun = manager._parts.saver.newest_save
    assert begun is not None
    with pytest.raises(SaveError, match="no space"):
        begun.result()
    with pytest.raises(SaveError, match="no space"):
        manager.save_async(2, STATE)
    # This one is called by all, and raises in all.
    with pytest.raises(SaveError, match="no answer"):
        manager.save(2, STATE)
    assert manager.save(3, STATE)
    manager.close()


def test_a_fence_is_said_whatever_the_saves_after_it_fail_with(
    manager: CheckpointManager, ends: Ends
) -> None:
    ends += [FencedError("another claim"), SaveError("no such folder")]
    manager.save_async(1, STATE)
    manager._parts.saver.wait_until_idle()
    manager._parts.saver.start_save(SaveRequest(step=2, state=STATE))
    with pytest.raises(FencedError, match="another claim"):
        manager.join()
    assert isinstance(manager._parts.saver.fence, FencedError)
    manager.close()


@pytest.mark.parametrize("error", [CompanionLostError, DevicesFullError, SaveError])
def test_a_save_for_a_notice_that_fails_is_made_again(
    manager: CheckpointManager, ends: Ends, error: type[StepkeeperError]
) -> None:
    ends += [error("killed for want of memory"), error("once more"), None]
    manager.request_stop()
    assert manager.step(1, STATE).stop
    assert not ends
    assert manager._parts.saver.own_commit == RECORD
    assert manager._parts.saver.error is None
    with pytest.raises(SystemExit):
        manager.exit_if_stopped()


def test_a_save_for_a_notice_that_fails_whenever_it_is_made_is_given_up(
    manager: CheckpointManager, ends: Ends
) -> None:
    ends += [SaveError("not allowed")] * 3 + [None]
    manager.request_stop()
    assert manager.step(1, STATE).stop
    assert ends == [None]
    assert "not allowed" in (manager._parts.saver.error or "")
    with pytest.raises(SystemExit):
        manager.exit_if_stopped()
