"""Test the errors of ranks that are about to save different states."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch does not list it

from stepkeeper.coordination.rank_group import StoreRankGroup
from stepkeeper.errors import SaveError
from stepkeeper.save import consistency
from stepkeeper.save.consistency import check_same_state
from stepkeeper.save.snapshot import Region, SnapshotTaker
from stepkeeper.save.snapshot.summary import StateSummary
from stepkeeper_planners import PerRank
from stepkeeper_planners.errors import RanksDifferError, UnsupportedShardingError
from stepkeeper_planners.geometry.layout import Ranks


def summary_of(state: dict[str, object], rank: int, world_size: int) -> StateSummary:
    return SnapshotTaker(Ranks(rank=rank, world_size=world_size)).take_snapshot(state, Region()).summary


def outcomes(
    summaries: Sequence[StateSummary | None], steps: Sequence[int] | None = None
) -> list[BaseException | None]:
    """Return what the check of each rank raised; a rank without a summary had no snapshot."""
    store = HashStore()
    steps = steps or [7] * len(summaries)

    def check(rank: int) -> BaseException | None:
        rank_group = StoreRankGroup(store, rank, len(summaries))
        refusal = "w: bad" if summaries[rank] is None else None
        try:
            check_same_state("save/0", steps[rank], summaries[rank], rank_group, refusal=refusal)
        except (RanksDifferError, SaveError) as error:
            return error
        return None

    with ThreadPoolExecutor(len(summaries)) as ranks:
        return list(ranks.map(check, range(len(summaries))))


def states_outcomes(states: Sequence[dict[str, object]]) -> list[BaseException | None]:
    return outcomes([summary_of(state, rank, len(states)) for rank, state in enumerate(states)])


def test_equal_states_pass_whatever_is_per_rank() -> None:
    states: list[dict[str, object]] = [
        {"w": torch.full((5,), rank / 3), "lr": 0.5, "names": {"a": 1, "b": 2}, "own": PerRank(rank)}
        for rank in range(3)
    ]
    states[1]["names"] = {"b": 2, "a": 1}
    assert states_outcomes(states) == [None] * 3


@pytest.mark.parametrize(
    ("other", "name", "reason"),
    [
        ({"position": 9}, "position", "PerRank"),
        ({"rng": torch.tensor([4], dtype=torch.uint8)}, "rng", "PerRank"),
        ({"w": torch.zeros(6)}, "w", "of another dtype, shape or placement"),
        ({"w": 1}, "w", "a value there, a tensor on the others"),
        ({"position": PerRank(8)}, "position", "a PerRank there, a value on the others"),
        ({"more": 1}, "more", "the other ranks have no such name"),
        ({"w": None}, "w", "a value there"),
    ],
)
def test_a_rank_that_differs_is_named_in_all_ranks(other: dict[str, object], name: str, reason: str) -> None:
    def state() -> dict[str, object]:
        return {"w": torch.zeros(5), "rng": torch.tensor([3], dtype=torch.uint8), "position": 8}

    errors = states_outcomes([state(), {**state(), **other}, state()])
    for error in errors:
        assert isinstance(error, RanksDifferError)
        assert error.ranks == {name: (1,)}
        assert reason in error.reasons[name]
    assert len({str(error) for error in errors}) == 1


def test_a_rank_without_a_snapshot_is_named_in_all_ranks() -> None:
    errors = outcomes([summary_of({"w": 1}, 0, 2), None])
    assert [str(error) for error in errors] == ["no snapshot of step 7: rank 1: w: bad"] * 2


def test_ranks_that_save_different_steps_are_told() -> None:
    same = summary_of({"w": 1}, 0, 2)
    errors = outcomes([same, same], steps=[7, 8])
    said = "the ranks save different steps: step 7 on ranks [0], step 8 on ranks [1]"
    assert [str(error) for error in errors] == [said] * 2


class Rows(torch.Tensor):
    """A tensor of which each rank knows its own rows only."""

    global_shape = (4, 2)
    global_offsets = ((0, 0),)
    local_offsets = ((0, 0),)
    local_sizes = ((2, 2),)


def test_a_tensor_that_no_rank_knows_alone_is_refused() -> None:
    state: dict[str, object] = {"table": torch.zeros(2, 2).as_subclass(Rows)}
    with pytest.raises(UnsupportedShardingError, match=r"^table: this rank knows only its own part"):
        summary_of(state, 0, 2)


def test_ranks_of_different_releases_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = iter(["release 1", "release 2"])
    monkeypatch.setattr(consistency, "describe_rules", lambda _: next(rules))
    for error in states_outcomes([{"w": 1}, {"w": 1}]):
        assert isinstance(error, SaveError)
        assert "run one release of stepkeeper on all" in str(error)
