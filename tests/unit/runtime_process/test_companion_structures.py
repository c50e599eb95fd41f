"""Test that a structure is sent once, and that nothing is ever written by another save's structure."""

import secrets
import struct
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from stepkeeper.checkpoint import BlockReader, SaveOrder, Structure, TensorOrder, read_manifests
from stepkeeper.checkpoint.dcp_format.metadata import merge_tensors
from stepkeeper.companion.messages import (
    ClaimRequest,
    CommitRequest,
    Committed,
    Kind,
    OpenRequest,
    UploadRequest,
    VoidRequest,
    WriteRequest,
)
from stepkeeper.companion.session import Session
from stepkeeper.companion.supervisor import Companion
from stepkeeper.contract.wire import decode, encode
from stepkeeper.coordination.rank_group import SoloRankGroup
from stepkeeper.errors import CompanionError, CompanionLostError, StorageError
from stepkeeper.save.in_flight import InFlight
from stepkeeper.save.job import SaveJob
from stepkeeper.save.persist import persist_save
from stepkeeper.save.snapshot import Region, SnapshotTaker
from stepkeeper.storage.memory import MemoryStore, named_bucket
from stepkeeper.tier import TierPlace
from stepkeeper_testing.background import done

ROWS = (
    TensorOrder(fqn='w\n"ü', dtype="float32", global_shape=(4, 8), offsets=(2, 0), sizes=(2, 8), start=0),
    TensorOrder(fqn="s", dtype="int64", global_shape=(), offsets=(), sizes=(), start=64),
)
STRUCTURE = Structure.build(ROWS, aliases={"v": "s"}, key_paths={"s": ("a", 0, "s")})
REQUEST = WriteRequest(
    step=1, claim=0, nonce="0", values=(), structure_key=STRUCTURE.key, structure=STRUCTURE.text
)


def session_of(rank: int = 1, world_size: int = 2, **opening: Any) -> Session:
    opening = {"uri": f"memory://{secrets.token_hex(4)}"} | opening
    return Session(OpenRequest(rank=rank, world_size=world_size, **opening), lambda directive: None)


def test_what_was_told_is_what_is_written_in_the_next_saves() -> None:
    session = session_of()
    first = session.shares.complete_order(REQUEST)
    again = session.shares.complete_order(replace(REQUEST, step=2, structure=None))
    assert first.structure == STRUCTURE
    assert first == SaveOrder(
        rank=1, world_size=2, step=1, claim=0, nonce="0", structure=STRUCTURE, values=()
    )
    assert again == replace(first, step=2)
    assert again.structure is first.structure
    assert (again.structure.aliases, again.structure.key_paths) == ({"v": "s"}, '{"s": ["a", 0, "s"]}')


@pytest.mark.parametrize(
    "other",
    [
        replace(STRUCTURE, tensors=ROWS[:1]),
        replace(STRUCTURE, tensors=(replace(ROWS[0], start=8), ROWS[1])),
        replace(STRUCTURE, tensors=(replace(ROWS[0], fqn="w"), ROWS[1])),
        replace(STRUCTURE, tensors=(replace(ROWS[0], global_shape=(8, 8)), ROWS[1])),
        replace(STRUCTURE, aliases={}),
        replace(STRUCTURE, key_paths='{"s": ["a", 1, "s"]}'),
    ],
)
def test_another_structure_has_another_key_and_only_the_last_is_held(other: Structure) -> None:
    session = session_of()
    assert other.key != STRUCTURE.key
    session.shares.complete_order(REQUEST)
    following = session.shares.complete_order(replace(REQUEST, structure_key=other.key, structure=other.text))
    assert following.structure == other
    with pytest.raises(CompanionError, match="by a structure that wasn't told"):
        session.shares.complete_order(replace(REQUEST, structure=None))


def test_nothing_is_written_by_a_key_that_what_was_told_does_not_have() -> None:
    session, other = session_of(), replace(STRUCTURE, aliases={})
    with pytest.raises(CompanionError, match="by a structure that wasn't told"):
        session.shares.complete_order(replace(REQUEST, structure=other.text))
    with pytest.raises(CompanionError, match="by a structure that wasn't told"):
        session.shares.complete_order(replace(REQUEST, structure=None))


@dataclass
class Process:
    """A companion process, in this one."""

    session: Session
    structure_key: str | None = None
    lost: bool = False
    tellings: list[bool] = field(default_factory=list)
    """For each write that was asked for, whether its structure came along."""

    fails: int = 0
    """The next so many writes."""

    fails_late: int = 0
    """The next so many, when it has done as it was asked."""

    def send_request(self, kind: Kind, raw: Any, fds: Any = (), *, timeout_s: float, **_: Any) -> Any:
        if kind in (Kind.WRITE, Kind.STAGE):
            body = decode(WriteRequest, raw)
            self.tellings.append(body.structure is not None)
            if self.fails:
                self.fails -= 1
                raise CompanionLostError("gone before it read that")
            do = self.session.shares.write_share if kind is Kind.WRITE else self.session.shares.stage_share
            written = do(body, fds[0])
            if self.fails_late:
                self.fails_late -= 1
                raise StorageError("no space left on device")
            return encode(written)
        if kind is Kind.VOID:
            return self.session.void_save(decode(VoidRequest, raw))
        if kind is Kind.UPLOAD:
            return encode(self.session.shares.upload_share(decode(UploadRequest, raw)))
        committed, after = self.session.commit_save(decode(CommitRequest, raw))
        done(after)
        return encode(committed)

    def upkeep_of(self, _slot: int) -> Future[None]:
        upkeep = Future[None]()
        upkeep.set_result(None)
        return upkeep


class Trainer:
    """Saves states of one rank."""

    def __init__(self, tier: TierPlace | None = None) -> None:
        self.name = secrets.token_hex(4)
        self.has_tier = tier is not None
        self.opening = OpenRequest(rank=0, world_size=1, uri=f"memory://{self.name}", tier=tier)
        self.running = Process(self.new_session())
        self.claim = self.running.session.claim_root(ClaimRequest()).claim
        self.rank_group, self.region, self.step = SoloRankGroup(), Region(), 0
        self.snapshots = SnapshotTaker(self.rank_group.ranks)

    def new_session(self) -> Session:
        return Session(self.opening, lambda directive: None)

    def lose(self) -> None:
        """Another companion process follows this one."""
        self.opening = replace(self.opening, claim=self.claim)
        self.running = Process(self.new_session())
        self.running.session.resume_claim()

    def claim_root(self, **_: object) -> Any:
        return SimpleNamespace(claim=self.claim)

    def ensure_process(self) -> Process:
        return self.running

    def save(self, state: dict[str, Any]) -> dict[str, bytes]:
        """All that the commit holds of tensors, by each of their names."""
        self.step += 1
        transferred: Future[None] = Future()
        transferred.set_result(None)
        job = SaveJob(
            name=str(self.step),
            in_flight=InFlight(self.step),
            origin=None,
            is_continued=True,
            snapshot=self.snapshots.take_snapshot(state, self.region),
            region=self.region,
            transfer=transferred,
        )
        return self.contents(persist_save(job, cast(Companion, self), self.rank_group))

    def contents(self, committed: Committed) -> dict[str, bytes]:
        store = MemoryStore(named_bucket(self.name))
        manifests = read_manifests(store, committed.record)
        reader = BlockReader(store, manifests)
        return {
            fqn: b"".join(
                reader.read_verified(
                    chunk.path,
                    chunk.offset_bytes + chunk.data_offset_bytes,
                    chunk.length_bytes - chunk.data_offset_bytes,
                )[: 4 * chunk.sizes[0]]
                for chunk in tensor.chunks
            )
            for fqn, tensor in merge_tensors(manifests).items()
        }


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    trainer = Trainer()
    yield trainer
    trainer.region.close()


def floats(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


def test_a_state_that_is_built_alike_is_told_of_once_and_another_one_anew(trainer: Trainer) -> None:
    assert trainer.save({"w": torch.ones(2), "n": 1}) == {"w": floats(1, 1)}
    assert trainer.save({"w": torch.zeros(2), "n": 1000}) == {"w": floats(0, 0)}
    assert trainer.save({"w": torch.ones(3), "b": torch.zeros(1)}) == {"w": floats(1, 1, 1), "b": floats(0)}
    assert trainer.save({"b": torch.ones(1), "w": torch.zeros(3)}) == {"w": floats(0, 0, 0), "b": floats(1)}
    tied = torch.ones(1)
    assert trainer.save({"b": tied, "w": torch.zeros(3), "v": tied})["v"] == floats(1)
    assert trainer.save({"w": torch.ones(2), "n": 1}) == {"w": floats(1, 1)}
    assert trainer.running.tellings[:3] == [True, False, True]
    assert trainer.running.tellings[4:] == [True, True]


def test_a_companion_that_follows_a_lost_one_is_told_all(trainer: Trainer) -> None:
    state = {"w": torch.ones(2)}
    trainer.save(state)
    trainer.lose()
    assert trainer.save(state) == {"w": floats(1, 1)}
    assert trainer.save(state) == {"w": floats(1, 1)}
    assert trainer.running.tellings == [True, False]


def test_a_failed_save_of_another_state_is_not_what_the_next_one_goes_by(trainer: Trainer) -> None:
    """The companion holds that one's structure: of the one before it, it has to be told again."""
    usual, other = {"w": torch.ones(2)}, {"w": torch.ones(3)}
    trainer.save(usual)
    trainer.running.fails_late = 1
    with pytest.raises(StorageError):
        trainer.save(other)
    assert trainer.save(usual) == {"w": floats(1, 1)}
    assert trainer.running.tellings == [True, True, True]
