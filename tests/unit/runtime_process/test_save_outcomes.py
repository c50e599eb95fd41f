"""Test how each rank reports a save that came to nothing."""

from collections.abc import Callable, Mapping
from typing import Any, SupportsIndex, cast

import numpy as np
import pytest
import torch
from typing_extensions import override

from stepkeeper.companion.supervisor import Companion
from stepkeeper.coordination.rank_group import SoloRankGroup
from stepkeeper.error_codec import encode_error
from stepkeeper.errors import (
    CompanionLostError,
    FencedError,
    OtherJobsRootError,
    PeerLostError,
    SaveError,
    StepkeeperError,
    StorageError,
)
from stepkeeper.save.job import SaveJob
from stepkeeper.save.persist import persist_save
from stepkeeper.save.request import SaveRequest, validate_step
from stepkeeper.save.snapshot import Region, SnapshotTaker
from stepkeeper.storage.memory import MemoryStore
from stepkeeper.training.stop_save import StopSave
from stepkeeper_planners.geometry.layout import Ranks
from stepkeeper_testing.saves import job_of, saver_with


class FailingCompanion:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def ensure_process(self) -> None:
        raise self.error

    def claim_root(self, **_: object) -> None:
        raise self.error


class FirstOfTwo(SoloRankGroup):
    """Rank 0, told of another rank's vote."""

    world_size = 2  # type: ignore[misc]  # SoloRankGroup's own is final
    ranks = Ranks(rank=0, world_size=2)  # type: ignore[misc]  # as above

    def __init__(self, other: Exception) -> None:
        super().__init__()
        self.other = other
        self.said: dict[str, Any] = {}

    @override
    def broadcast(self, name: str, value: Mapping[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        assert value is not None
        assert timeout_s
        self.said[name] = value
        return dict(value)

    @override
    def gather(self, name: str, value: Mapping[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        assert timeout_s
        return [dict(value), {"error": encode_error(self.other)} if name.endswith("/vote") else dict(value)]


def a_job() -> SaveJob:
    region = Region()
    return job_of(SnapshotTaker(Ranks(rank=0, world_size=1)).take_snapshot({"step": 7}, region), region)


@pytest.mark.parametrize(
    ("own", "other", "raised", "shared"),
    [
        (CompanionLostError, CompanionLostError, CompanionLostError, CompanionLostError),
        (CompanionLostError, StorageError, SaveError, SaveError),
        (StorageError, CompanionLostError, StorageError, SaveError),
        (CompanionLostError, OtherJobsRootError, FencedError, FencedError),
        (StorageError, StorageError, StorageError, SaveError),
    ],
)
def test_a_lost_companion_is_one_for_all_ranks_or_for_none(
    own: Callable[[str], StepkeeperError],
    other: Callable[[str], StepkeeperError],
    raised: type[Exception],
    shared: type[Exception],
) -> None:
    rank_group = FirstOfTwo(other("of rank 1"))
    with pytest.raises(raised) as caught:
        persist_save(a_job(), cast(Companion, FailingCompanion(own("of rank 0"))), rank_group)
    assert type(caught.value) is raised
    said = rank_group.said["save/0/outcome"]["error"]
    assert said["kind"] == shared.__name__
    assert "rank 0: of rank 0; rank 1: of rank 1" in said["message"]


def test_a_lost_peer_is_called_one_however_it_came_up() -> None:
    class Alone(SoloRankGroup):
        def gather(self, name: str, value: Mapping[str, Any], timeout_s: float) -> list[dict[str, Any]]:  # type: ignore[explicit-override]  # Python 3.11 has no typing.override
            if name.startswith("probe/"):
                return [dict(value)]
            raise PeerLostError(f"{name}: rank 1 is lost {value} {timeout_s}")

    companion = FailingCompanion(CompanionLostError("gone"))
    saves = saver_with(companion, Alone())
    saves.start_save(SaveRequest(step=7, state={"step": 7}))
    assert saves.wait_until_idle(10)
    with pytest.raises(PeerLostError, match="rank 1 is lost"):
        saves.raise_failure()
    saves.close()


def test_a_lost_companion_is_forgiven_until_the_last_save_or_the_second_loss() -> None:
    companion = FailingCompanion(CompanionLostError("gone"))
    saves = saver_with(companion)
    saves.start_save(SaveRequest(step=7, state={"step": 7}))
    assert saves.wait_until_idle(10)
    saves.raise_failure()
    with pytest.raises(SaveError, match="gone"):
        saves.raise_failure(newest=True)
    for step in (8, 9):
        saves.start_save(SaveRequest(step=step, state={"step": step}))
        assert saves.wait_until_idle(10)
        with pytest.raises(SaveError, match="gone"):
            saves.raise_failure()
    saves.close()


@pytest.mark.parametrize("step", [np.int64(5), torch.tensor(5), True + 4])
def test_a_step_is_a_number_of_whatever_library(step: SupportsIndex) -> None:
    assert type(validate_step(step)) is int
    with pytest.raises(ValueError, match="at least 0"):
        validate_step(-1)
    with pytest.raises(TypeError):
        validate_step(cast(SupportsIndex, 1.5))


def test_nothing_is_begun_and_nothing_restored_before_the_root_is_proven() -> None:
    def refuse(moment: str, operation: str, path: str) -> None:
        if operation != "list":
            raise StorageError(f"{path}: not allowed {moment} {operation}")

    companion = FailingCompanion(AssertionError("the companion was asked"))
    store = MemoryStore(hook=refuse)
    saves = saver_with(companion, store=store)
    for use in (
        saves.await_saves_and_prove_root,
        lambda: saves.start_save(SaveRequest(step=7, state={"step": 7})),
    ):
        with pytest.raises(StorageError, match=r"\.stepkeeper/probes/.* not allowed"):
            use()
    StopSave(saves, SoloRankGroup()).start(SaveRequest(step=7, state={"step": 7}), 1.0)
    assert saves.newest_save is None
    saves.close()
