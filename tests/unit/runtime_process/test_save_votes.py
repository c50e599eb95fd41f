"""One rank that couldn't write is enough: the save is void, however well the others wrote."""

from typing import Any, cast

from stepkeeper.companion.client import CompanionProcess, error_to
from stepkeeper.companion.messages import Kind, Written
from stepkeeper.contract.wire import encode
from stepkeeper.errors import StorageError
from stepkeeper.log import ManifestRef
from stepkeeper.persist import SaveJob, _decide, _Place
from stepkeeper.snapshot import Region, Snapshot


class Asked:
    """Rank 0's companion, which does all that it is asked."""

    lost = False

    def __init__(self) -> None:
        self.kinds: list[Kind] = []

    def ask(self, kind: Kind, body: Any = None, *, timeout_s: float) -> dict[str, Any]:
        assert timeout_s
        self.kinds.append(kind)
        return {}


def decide(*votes: dict[str, Any]) -> tuple[list[Kind], dict[str, Any]]:
    """What rank 0 asks its companion for after these votes, and what it tells the others."""
    asked = Asked()
    job = SaveJob(
        name="save/0",
        step=7,
        base=None,
        snapshot=cast(Snapshot, None),
        region=cast(Region, None),
        moved=lambda _: None,
        duration_millis=lambda: 1,
    )
    place = _Place(claim=0, nonce="a" * 32)
    outcome = _decide(job, cast(CompanionProcess, asked), place, list(votes))
    return asked.kinds, outcome


def wrote(rank: int) -> dict[str, Any]:
    ref = ManifestRef(path=f"manifest.{rank}.json", size_bytes=1, crc32c=1)
    return {"written": encode(Written(size_bytes=1, manifest=ref))}


FAILED = {"error": error_to(StorageError(28, "no space left"))}


def test_what_all_ranks_wrote_is_committed() -> None:
    assert decide(wrote(0), wrote(1))[0] == [Kind.COMMIT]


def test_what_one_rank_could_not_write_is_void() -> None:
    for votes in ((wrote(0), FAILED), (FAILED, wrote(1)), (wrote(0), FAILED, wrote(2))):
        kinds, outcome = decide(*votes)
        assert kinds == [Kind.VOID]
        assert "no space left" in outcome["error"]["message"]
