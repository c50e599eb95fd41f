"""A trainer's claims and orders, and the companions that come and go."""

import json
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepkeeper.checkpoint.orders import Structure, TensorOrder, ValueOrder
from stepkeeper.companion import supervisor
from stepkeeper.companion.messages import ClaimRequest, Kind, OpenRequest, WriteRequest
from stepkeeper.companion.session import Session
from stepkeeper.companion.supervisor import Companion, Origin
from stepkeeper.contract.wire import decode, encode
from stepkeeper.errors import CompanionError, CompanionLostError, TransientStorageError, UnknownOutcomeError
from stepkeeper.log import BeginEntry, CommitRecord, Log
from stepkeeper.storage.retry import Patience
from stepkeeper.tier import TierPlace
from stepkeeper_testing.checkpoints import save_order, write_request
from stepkeeper_testing.memory import MemoryStore, named_bucket
from stepkeeper_testing.saves import REF


class InThisProcess:
    """A companion without a process: killed before or after it begins, if it is told so."""

    pid = 1
    dies: str | None = None

    def __init__(self, on_directive: Callable[[Any], None]) -> None:
        self.lost = False
        self.session: Session | None = None

    def dismiss(self) -> None:
        """Nothing of it is anywhere else."""

    def send_request(self, kind: Kind, body: dict[str, Any], **_: object) -> dict[str, Any]:
        if kind is Kind.OPEN:
            self.session = Session(
                decode(OpenRequest, body),
                lambda _directive: None,
                patience=Patience(total_s=0, sleep=lambda _: None),
            )
            self.session.resume_claim()
            return {}
        assert self.session is not None
        if kind is Kind.REFRESH:
            refreshed: dict[str, Any] = encode(self.session.refresh_head())
            return refreshed
        assert kind is Kind.CLAIM
        self.die("before")
        begun: dict[str, Any] = encode(self.session.claim_root(decode(ClaimRequest, body)))
        self.die("after")
        return begun

    def die(self, moment: str) -> None:
        if InThisProcess.dies == moment:
            InThisProcess.dies = None
            self.lost = True
            raise CompanionLostError(f"killed {moment} it began")

    def send_state(self, kind: Kind, body: dict[str, Any]) -> None:
        pass

    def close(self, timeout_s: float = 0.0) -> None:
        pass


class Root:
    def __init__(self) -> None:
        self.uri = f"memory://{secrets.token_hex(4)}"
        self.store = MemoryStore(named_bucket(self.uri.removeprefix("memory://")))

    def companion(self) -> Companion:
        return Companion(OpenRequest(rank=0, world_size=1, uri=self.uri), lambda _directive: None)

    def log(self) -> Log:
        log = Log(self.store)
        log.open()
        return log

    def commit(self, companion: Companion, step: int) -> CommitRecord:
        assert companion.claimed_root is not None
        claim, log = companion.claimed_root.claim, self.log()
        folder = f"{step}/{claim.slot}-{secrets.token_hex(16)}"
        return log.commit(claim, step=step, folder=folder, size_bytes=1, manifest=REF)

    def begins(self) -> list[BeginEntry]:
        log = self.log()
        bodies = [log.entry(slot).body for slot in range(log.state.tail + 1)]
        return [body for body in bodies if isinstance(body, BeginEntry)]

    def bases(self) -> list[int | None]:
        return [body.base for body in self.begins()]


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Root:
    monkeypatch.setattr(supervisor, "CompanionProcess", InThisProcess)
    monkeypatch.setattr(InThisProcess, "dies", None)
    return Root()


def test_a_restore_of_an_older_commit_is_begun_with_once_however_many_saves_there_are(root: Root) -> None:
    companion = root.companion()
    claim = companion.claim_root().claim
    first, _ = (root.commit(companion, step) for step in (1, 2))
    back = Origin(first.slot)
    begun = companion.claim_root(origin=back)
    assert begun.claim.slot > claim.slot
    assert (begun.base, companion.claimed_root) == (first, begun)
    assert root.commit(companion, 3).parent == first.slot
    assert companion.claim_root(origin=back) == begun
    assert companion.claim_root() == begun
    # The same commit restored again: what was saved meanwhile is no part of that state either.
    assert companion.claim_root(origin=Origin(first.slot)).claim.slot > begun.claim.slot
    assert root.commit(companion, 4).parent == first.slot
    assert root.bases() == [None, first.slot, first.slot]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_companion_that_is_lost_while_it_goes_back_costs_no_more_than_itself(
    root: Root, moment: str
) -> None:
    """The next one isn't fenced by what the lost one may have put."""
    companion = root.companion()
    companion.claim_root()
    first, _ = (root.commit(companion, step) for step in (1, 2))
    back = Origin(first.slot)
    InThisProcess.dies = moment
    with pytest.raises(CompanionLostError):
        companion.claim_root(origin=back)
    companion.claim_root(origin=back)
    assert root.bases() == [None, first.slot]
    assert root.commit(companion, 3).parent == first.slot


def test_what_had_no_answer_is_asked_for_again_before_anything_else(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    companion = root.companion()
    companion.claim_root()
    first, second, _ = (root.commit(companion, step) for step in (1, 2, 3))
    with monkeypatch.context() as patch:

        def unanswered(*_: object) -> bool:
            raise TransientStorageError("no answer")

        patch.setattr(MemoryStore, "put_if_absent", unanswered)
        with pytest.raises(UnknownOutcomeError):
            companion.claim_root(origin=Origin(first.slot))
    companion.claim_root(origin=Origin(second.slot))
    assert root.bases() == [None, first.slot, second.slot]
    assert root.commit(companion, 4).parent == second.slot


def test_who_has_restored_nothing_goes_on_from_head_with_greater_steps_only(root: Root) -> None:
    before = root.companion()
    before.claim_root()
    old = [root.commit(before, step) for step in (10, 20)][-1]
    companion = root.companion()
    companion.claim_root(unrestored_step=21)
    assert root.commit(companion, 21).parent == old.slot
    assert companion.claim_root(unrestored_step=21).base == old, "its own commit saved again is no older step"
    tail = root.log().state.tail
    branch = companion.claim_root(unrestored_step=20)
    assert branch.branching
    assert branch.claim.slot == tail + 1
    assert root.log().state.head == tail, "HEAD stays until there is a commit"
    assert root.commit(companion, 20).parent is None
    # From here on nothing is there that it hasn't saved itself.
    assert companion.claim_root(unrestored_step=1) == branch
    assert root.commit(companion, 1).parent is not None
    assert [bool(body.branch) for body in root.begins()] == [False, False, True]


ROWS = (
    TensorOrder(fqn='w\n"ü', dtype="float32", global_shape=(4, 8), offsets=(2, 0), sizes=(2, 8), start=0),
    TensorOrder(fqn="s", dtype="int64", global_shape=(), offsets=(), sizes=(), start=64),
)


STRUCTURE = Structure(tensors=tuple(ROWS), aliases={"v": "s"}, key_paths=json.dumps({"s": ("a", 0, "s")}))


REQUEST = WriteRequest(
    step=1, claim=0, nonce="0", values=(), structure_key=STRUCTURE.key, structure=STRUCTURE.text
)


@pytest.mark.parametrize(
    "other",
    [
        replace(STRUCTURE, tensors=(ROWS[0]._replace(start=8), ROWS[1])),
        replace(STRUCTURE, tensors=(ROWS[0]._replace(fqn="w"), ROWS[1])),
        replace(STRUCTURE, aliases={}),
        replace(STRUCTURE, key_paths='{"s": ["a", 1, "s"]}'),
    ],
)
def test_another_structure_has_another_key_and_only_the_last_is_held(other: Structure) -> None:
    opening = OpenRequest(uri=f"memory://{secrets.token_hex(4)}", rank=1, world_size=2)
    session = Session(opening, lambda directive: None)
    assert other.key != STRUCTURE.key
    first = session.shares.complete_order(REQUEST)
    assert first.structure == STRUCTURE
    assert session.shares.complete_order(replace(REQUEST, structure=None)) == first
    following = session.shares.complete_order(replace(REQUEST, structure_key=other.key, structure=other.text))
    assert following.structure == other
    with pytest.raises(CompanionError, match="names an unknown structure"):
        session.shares.complete_order(replace(REQUEST, structure=None))


DATA = b"what torch.save wrote of a value"


@pytest.fixture
def region() -> Iterator[int]:
    fd = os.memfd_create("region")
    os.write(fd, DATA)
    yield fd
    os.close(fd)


def test_a_disk_that_takes_nothing_is_said_once_until_it_does_again(tmp_path: Path, region: int) -> None:
    disk = tmp_path / "ssd"
    tier, uri = TierPlace(folder=str(disk / "tier")), f"memory://{secrets.token_hex(4)}"
    session = Session(OpenRequest(rank=0, world_size=1, uri=uri, tier=tier), lambda directive: None)

    def stage(step: int) -> tuple[bool, bool]:
        claim = session.claim_root(ClaimRequest()).claim.slot if step == 1 else 0
        value = ValueOrder(fqn="n", start=0, length_bytes=len(DATA))
        order = save_order([], [value], rank=0, world_size=1, step=step, claim=claim)
        staged = session.shares.stage_share(write_request(order), region)
        return staged.held, staged.why_not is not None

    assert [stage(1), stage(2)] == [(False, True), (False, False)]
    disk.mkdir()
    assert stage(3) == (True, False)
    disk.rename(tmp_path / "away")
    assert stage(4) == (False, True)
