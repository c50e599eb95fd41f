"""One rank that couldn't write is enough: the save is void, however well the others wrote."""

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
from stepkeeper.coordination.rank_group import SoloRankGroup, StoreRankGroup
from stepkeeper.error_codec import encode_error
from stepkeeper.errors import (
    CompanionLostError,
    FencedError,
    MissingObjectError,
    PeerLostError,
    StorageError,
)
from stepkeeper.log import ManifestRef
from stepkeeper.save.job import Place
from stepkeeper.save.persist import _commit_or_void, persist_save
from stepkeeper.save.snapshot import Region, Snapshot, SnapshotTaker
from stepkeeper_testing.saves import job_of


class Asked:
    """Rank 0's companion, which does all that it is asked."""

    lost = False

    def __init__(self) -> None:
        self.kinds: list[Kind] = []

    def send_request(self, kind: Kind, body: Any = None, *, timeout_s: float, **_: Any) -> dict[str, Any]:
        assert timeout_s
        self.kinds.append(kind)
        return {}


def decide(*votes: dict[str, Any]) -> tuple[list[Kind], dict[str, Any]]:
    """Return what rank 0 asks its companion for after these votes, and what it tells the others."""
    asked = Asked()
    place = Place(claim=0, nonce="a" * 32)
    outcome = _commit_or_void(
        job_of(cast(Snapshot, None), cast(Region, None)),
        cast(Companion, asked),
        cast(CompanionProcess, asked),
        place,
        list(votes),
        entry_s=900,
    )
    return asked.kinds, outcome


def wrote(rank: int) -> dict[str, Any]:
    ref = ManifestRef(path=f"manifest.{rank}.json", size_bytes=1, crc32c=1)
    return {"written": encode(Written(size_bytes=1, manifest=ref))}


FAILED = {"error": encode_error(StorageError(28, "no space left"))}


def test_what_all_ranks_wrote_is_committed() -> None:
    assert decide(wrote(0), wrote(1))[0] == [Kind.COMMIT]


def test_what_one_rank_could_not_write_is_void() -> None:
    for votes in ((wrote(0), FAILED), (FAILED, wrote(1)), (wrote(0), FAILED, wrote(2))):
        kinds, outcome = decide(*votes)
        assert kinds == [Kind.VOID]
        assert "no space left" in outcome["error"]["message"]


@pytest.mark.parametrize("takes_void", [True, False])
def test_a_save_that_a_lost_rank_has_not_voted_for_is_void(takes_void: bool) -> None:
    class Present(Asked):
        has_tier = False
        structure_key = None

        def claim_root(self, **_: object) -> Any:
            return SimpleNamespace(claim=SimpleNamespace(slot=0))

        def ensure_process(self) -> "Present":
            return self

        @override
        def send_request(self, kind: Kind, body: Any = None, *_: Any, **__: Any) -> dict[str, Any]:
            self.kinds.append(kind)
            if kind is Kind.VOID and not takes_void:
                raise CompanionLostError("it is gone")
            return cast(dict[str, Any], wrote(0)["written"])

    class Alone(SoloRankGroup):
        @override
        def gather(self, name: str, value: Any, timeout_s: float) -> list[dict[str, Any]]:
            if name.endswith("/vote"):
                raise PeerLostError("rank 1 is far behind")
            return super().gather(name, value, timeout_s)

    rank_group, region, companion = Alone(), Region(), Present()
    snapshot = SnapshotTaker(rank_group.ranks).take_snapshot({"w": torch.ones(2)}, region)
    with pytest.raises(PeerLostError, match="far behind"):
        persist_save(job_of(snapshot, region), cast(Companion, companion), rank_group)
    assert companion.kinds == [Kind.WRITE, Kind.VOID]
    region.close()


class Tiered:
    """A companion with a local disk; its commits fail."""

    has_tier = True
    structure_key = None

    def __init__(self) -> None:
        self.kinds: list[Kind] = []

    def claim_root(self, **_: object) -> Any:
        return SimpleNamespace(claim=SimpleNamespace(slot=0))

    def ensure_process(self) -> "Tiered":
        return self

    lost = False

    def send_request(self, kind: Kind, body: Any, fds: Any = (), *, timeout_s: float, **_: Any) -> Any:
        self.kinds.append(kind)
        if kind is Kind.COMMIT:
            raise StorageError("no")
        return encode(Staged(held=True)) if kind is Kind.STAGE else wrote(0)["written"]


@pytest.mark.parametrize(("is_last", "ways"), [(False, [Kind.STAGE, Kind.UPLOAD]), (True, [Kind.WRITE])])
def test_the_last_save_goes_straight_to_the_root(is_last: bool, ways: list[Kind]) -> None:
    """A notice's has seconds, and its pod's disk goes with the pod."""
    rank_group, region, companion = SoloRankGroup(), Region(), Tiered()
    snapshot = SnapshotTaker(rank_group.ranks).take_snapshot({"w": torch.ones(2)}, region)
    job = replace(job_of(snapshot, region), is_last=is_last)
    with pytest.raises(StorageError):
        persist_save(job, cast(Companion, companion), rank_group)
    assert companion.kinds == [*ways, Kind.COMMIT, Kind.VOID]
    region.close()


class Stale:
    """A companion of a claim that doesn't hold any more. What the newer claim has collected can't be written."""

    has_tier = False
    structure_key = None

    def __init__(self, fails: Kind, *, lost: bool = False) -> None:
        self._fails = fails
        self.lost = lost

    def claim_root(self, **_: object) -> Any:
        return SimpleNamespace(claim=SimpleNamespace(slot=0))

    def ensure_process(self) -> "Stale":
        if self.lost:
            raise FencedError("claim 0 is stale")
        return self

    def send_request(self, kind: Kind, body: Any, fds: Any = (), *, timeout_s: float) -> Any:
        if kind is self._fails:
            raise MissingObjectError(2, "its folder was collected")
        if kind is Kind.VOID:
            raise FencedError("claim 0 is stale")
        return wrote(0)["written"]


@pytest.mark.parametrize("fails", [Kind.WRITE, Kind.COMMIT])
@pytest.mark.parametrize("stale_rank", [0, 1])
def test_what_fails_because_of_a_newer_claim_is_said_to_be_fenced_on_all_ranks(
    fails: Kind, stale_rank: int
) -> None:
    """Whatever a rank has failed with itself: the exit code must say that another start goes on."""
    store = HashStore()
    rank_groups = [StoreRankGroup(store, rank, 2) for rank in range(2)]

    def save(rank_group: StoreRankGroup) -> None:
        region = Region()
        snapshot = SnapshotTaker(rank_group.ranks).take_snapshot({"w": torch.zeros(3)}, region)
        fails_here = fails if fails is Kind.COMMIT or rank_group.rank == stale_rank else Kind.STAGE
        persist_save(job_of(snapshot, region), cast(Companion, Stale(fails_here)), rank_group)

    with ThreadPoolExecutor(2) as ranks:
        saves = [ranks.submit(save, rank_group) for rank_group in rank_groups]
        try:
            for each in saves:
                with pytest.raises(FencedError, match="claim 0 is stale"):
                    each.result(60)
        finally:
            for rank_group in rank_groups:
                rank_group.abort()
