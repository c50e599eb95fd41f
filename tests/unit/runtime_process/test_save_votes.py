"""A save is one of all ranks or of none: their states, their votes, and how each reports what came to nothing."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch does not list it
from typing_extensions import override

from stepkeeper.companion.client import CompanionProcess
from stepkeeper.companion.messages import Kind, Staged, Written
from stepkeeper.companion.supervisor import Companion
from stepkeeper.contract.wire import encode
from stepkeeper.coordination.rank_group import RankGroup, SoloRankGroup, StoreRankGroup
from stepkeeper.ending.machine import Ending
from stepkeeper.errors import (
    CompanionLostError,
    FencedError,
    MissingObjectError,
    PeerLostError,
    SaveError,
    StorageError,
    encode_error,
)
from stepkeeper.log import ManifestRef
from stepkeeper.save import consistency
from stepkeeper.save.consistency import check_same_state
from stepkeeper.save.given_state import SaveRequest
from stepkeeper.save.job import Place
from stepkeeper.save.persist import _commit_or_void, persist_save
from stepkeeper.save.snapshot.region import Region
from stepkeeper.save.snapshot.take import Snapshot, SnapshotTaker
from stepkeeper_planners import PerRank
from stepkeeper_planners.errors import RanksDifferError
from stepkeeper_planners.geometry.layout import Ranks
from stepkeeper_testing.memory import MemoryStore
from stepkeeper_testing.saves import job_of, saver_with, shell_of

Digest = Callable[[], dict[str, bytes]]


def digest_of(state: dict[str, object], rank: int, world_size: int) -> Digest:
    return SnapshotTaker(Ranks(rank=rank, world_size=world_size)).take_snapshot(state, Region()).digest


def outcomes(
    digests: Sequence[Digest | None], steps: Sequence[int] | None = None
) -> list[BaseException | None]:
    """Return what the check of each rank raised; a rank without digests had no snapshot."""
    store = HashStore()
    steps = steps or [7] * len(digests)

    def check(rank: int) -> BaseException | None:
        rank_group = StoreRankGroup(store, rank, len(digests))
        refusal = "w: bad" if digests[rank] is None else None
        try:
            check_same_state("save/0", steps[rank], digests[rank], rank_group, refusal=refusal)
        except (RanksDifferError, SaveError) as error:
            return error
        return None

    with ThreadPoolExecutor(len(digests)) as ranks:
        return list(ranks.map(check, range(len(digests))))


def states_outcomes(states: Sequence[dict[str, object]]) -> list[BaseException | None]:
    return outcomes([digest_of(state, rank, len(states)) for rank, state in enumerate(states)])


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
        ({"w": torch.zeros(6)}, "w", "of another dtype, shape or placement"),
        ({"w": 1}, "w", "a value, but a tensor on the other ranks"),
        ({"position": PerRank(8)}, "position", "a PerRank, but a value on the other ranks"),
        ({"more": 1}, "more", "the other ranks have no such name"),
        ({"w": None}, "w", "a value, but a tensor"),
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


@pytest.mark.parametrize(
    ("steps", "has_snapshot", "said"),
    [
        ([7, 8], True, "the ranks save different steps: step 7 on ranks [0], step 8 on ranks [1]"),
        ([7, 7], False, "no snapshot of step 7: rank 1: w: bad"),
    ],
)
def test_ranks_without_the_same_step_are_named_in_all_ranks(
    steps: list[int], has_snapshot: bool, said: str
) -> None:
    same = digest_of({"w": 1}, 0, 2)
    errors = outcomes([same, same if has_snapshot else None], steps)
    assert [str(error) for error in errors] == [said] * 2


def test_ranks_of_different_releases_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = iter(["release 1", "release 2"])
    monkeypatch.setattr(consistency, "describe_rules", lambda _: next(rules))
    for error in states_outcomes([{"w": 1}, {"w": 1}]):
        assert isinstance(error, SaveError)
        assert "run the same release of stepkeeper on all ranks" in str(error)


class Asked:
    """A rank's companion: it does all that it is asked, but for what fails."""

    structure_key = None
    lost = False

    def __init__(self, fails: Mapping[Kind, Exception], *, has_tier: bool = False) -> None:
        self.has_tier = has_tier
        self._fails = fails
        self.kinds: list[Kind] = []

    def claim_root(self, **_: object) -> Any:
        return SimpleNamespace(claim=SimpleNamespace(slot=0))

    def ensure_process(self) -> "Asked":
        return self

    def send_request(self, kind: Kind, *_: Any, **__: Any) -> Any:
        self.kinds.append(kind)
        if kind in self._fails:
            raise self._fails[kind]
        return encode(Staged(held=True)) if kind is Kind.STAGE else wrote(0)["written"]


def persist(companion: object, rank_group: RankGroup | None = None, *, is_last: bool = False) -> None:
    rank_group, region = rank_group or SoloRankGroup(), Region()
    snapshot = SnapshotTaker(rank_group.ranks).take_snapshot({"w": torch.ones(2)}, region)
    try:
        persist_save(
            replace(job_of(snapshot, region), is_last=is_last), cast(Companion, companion), rank_group
        )
    finally:
        region.close()


def decide(*votes: dict[str, Any]) -> tuple[list[Kind], dict[str, Any]]:
    """Return what rank 0 asks its companion for after these votes, and what it tells the others."""
    asked = Asked({})
    place = Place(claim=0, nonce="a" * 32)
    outcome = _commit_or_void(
        job_of(cast(Snapshot, None), cast(Region, None)),
        cast(Companion, asked),
        cast(CompanionProcess, asked),
        place,
        list(votes),
    )
    return asked.kinds, outcome


def wrote(rank: int) -> dict[str, Any]:
    ref = ManifestRef(path=f"manifest.{rank}.json", size_bytes=1, crc32c=1)
    return {"written": encode(Written(size_bytes=1, manifest=ref))}


FAILED = {"error": encode_error(StorageError(28, "no space left"))}


def test_what_one_rank_could_not_write_is_void() -> None:
    assert decide(wrote(0), wrote(1))[0] == [Kind.COMMIT]
    for votes in ((wrote(0), FAILED), (FAILED, wrote(1)), (wrote(0), FAILED, wrote(2))):
        kinds, outcome = decide(*votes)
        assert kinds == [Kind.VOID]
        assert "no space left" in outcome["error"]["message"]


@pytest.mark.parametrize(
    "fails", [{}, {Kind.VOID: CompanionLostError("it is gone")}], ids=["void", "lost too"]
)
def test_a_save_that_a_lost_rank_has_not_voted_for_is_void(fails: dict[Kind, Exception]) -> None:
    class Alone(SoloRankGroup):
        @override
        def gather(self, name: str, value: Any, timeout_s: float) -> list[dict[str, Any]]:
            if name.endswith("/vote"):
                raise PeerLostError("rank 1 is far behind")
            return super().gather(name, value, timeout_s)

    companion = Asked(fails)
    with pytest.raises(PeerLostError, match="far behind"):
        persist(companion, Alone())
    assert companion.kinds == [Kind.WRITE, Kind.VOID]


@pytest.mark.parametrize(("is_last", "ways"), [(False, [Kind.STAGE, Kind.UPLOAD]), (True, [Kind.WRITE])])
def test_the_last_save_goes_straight_to_the_root(is_last: bool, ways: list[Kind]) -> None:
    """A notice's has seconds, and its pod's disk goes with the pod."""
    companion = Asked({Kind.COMMIT: StorageError("no")}, has_tier=True)
    with pytest.raises(StorageError):
        persist(companion, is_last=is_last)
    assert companion.kinds == [*ways, Kind.COMMIT, Kind.VOID]


@pytest.mark.parametrize("fails", [Kind.WRITE, Kind.COMMIT])
@pytest.mark.parametrize("stale_rank", [0, 1])
def test_what_fails_because_of_a_newer_claim_is_said_to_be_fenced_on_all_ranks(
    fails: Kind, stale_rank: int
) -> None:
    """In spite of a rank's own failure, the exit code must show that another start continues."""
    store = HashStore()
    rank_groups = [StoreRankGroup(store, rank, 2) for rank in range(2)]

    def save(rank_group: StoreRankGroup) -> None:
        fails_here = fails if fails is Kind.COMMIT or rank_group.rank == stale_rank else Kind.STAGE
        collected = MissingObjectError(2, "its folder was collected")
        persist(Asked({fails_here: collected, Kind.VOID: FencedError("claim 0 is stale")}), rank_group)

    with ThreadPoolExecutor(2) as ranks:
        saves = [ranks.submit(save, rank_group) for rank_group in rank_groups]
        try:
            for each in saves:
                with pytest.raises(FencedError, match="claim 0 is stale"):
                    each.result(60)
        finally:
            for rank_group in rank_groups:
                rank_group.abort()


class FailingCompanion:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def ensure_process(self) -> None:
        raise self.error

    def claim_root(self, **_: object) -> None:
        raise self.error


def test_a_lost_companion_is_forgiven_until_the_last_save_or_the_second_loss() -> None:
    companion = FailingCompanion(CompanionLostError("gone"))
    saves = saver_with(companion)
    saves.start_save(SaveRequest(step=7, state={"step": 7}))
    assert saves.wait_until_idle(10)
    saves.failures.raise_failure()
    with pytest.raises(SaveError, match="gone"):
        saves.failures.raise_failure(newest=True)
    for step in (8, 9):
        saves.start_save(SaveRequest(step=step, state={"step": step}))
        assert saves.wait_until_idle(10)
        with pytest.raises(SaveError, match="gone"):
            saves.failures.raise_failure()
    saves.close()


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
    ending = Ending().reach(7).stop()
    assert "not allowed" in str(shell_of(saves, 7, left_s=1.0)._make(ending).loss)
    assert saves.newest_save is None
    saves.close()
