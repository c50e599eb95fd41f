"""Put a root through its operations, with the shipped companion sessions, and check what must hold after the worst."""

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, final

from stepkeeper.checkpoint.dcp_format.metadata import merge_tensors
from stepkeeper.checkpoint.orders import SaveOrder, Structure, TensorOrder
from stepkeeper.checkpoint.reading import BlockReader, read_manifests
from stepkeeper.companion.messages import ClaimRequest, CommitRequest, OpenRequest, VoidRequest, Written
from stepkeeper.companion.session import Session
from stepkeeper.log import Claim, CommitRecord, Log
from stepkeeper.log.entries import new_nonce
from stepkeeper.policy.keep import Keep, LastN
from stepkeeper.storage.base import Store
from stepkeeper.storage.retry import Patience
from stepkeeper_testing.background import done
from stepkeeper_testing.checkpoints import write_request

_IMPATIENT: Final = Patience(total_s=0.0, sleep=lambda _: None)
_N_COLUMNS: Final = 64


def _saved_bytes(step: int, rank: int) -> bytes:
    """Return what `rank` saves at `step`: its row of `model.w`."""
    return struct.pack(
        f"<{_N_COLUMNS}f", *(1000 * step + 100 * rank + column for column in range(_N_COLUMNS))
    )


@contextmanager
def _region(data: bytes) -> Iterator[int]:
    fd = os.memfd_create("region")
    try:
        os.write(fd, data)
        yield fd
    finally:
        os.close(fd)


@final
class Companions:
    """One start of a job: the companions of its ranks, in this process."""

    def __init__(
        self,
        uri: str,
        world_size: int = 1,
        *,
        last: int | None = None,
        wrap: Callable[[int, Store], Store] = lambda rank, store: store,
    ) -> None:
        """With `last`, so many commits are kept. `wrap` may put a store around each rank's."""
        keep = None if last is None else Keep(last=(LastN(last),))
        self.claim = Claim(slot=-1, nonce="")
        self.sessions = []
        for rank in range(world_size):
            opening = OpenRequest(rank=rank, world_size=world_size, uri=uri, keep=keep)
            session = Session(opening, lambda directive: None, patience=_IMPATIENT)
            wrapped = wrap(rank, session._store)
            session._store = session._log._store = wrapped
            session.shares._store = session._upkeep._store = wrapped
            self.sessions.append(session)

    def begin(self) -> None:
        self.claim = self.sessions[0].claim_root(ClaimRequest()).claim

    def order(self, step: int, rank: int, nonce: str) -> SaveOrder:
        world_size = len(self.sessions)
        row = TensorOrder(
            fqn="model.w",
            dtype="float32",
            global_shape=(world_size, _N_COLUMNS),
            offsets=(rank, 0),
            sizes=(1, _N_COLUMNS),
            start=0,
        )
        return SaveOrder(
            rank=rank,
            world_size=world_size,
            step=step,
            claim=self.claim.slot,
            nonce=nonce,
            structure=Structure(tensors=(row,)),
            values=(),
        )

    def write(self, order: SaveOrder) -> Written:
        with _region(_saved_bytes(order.step, order.rank)) as fd:
            return self.sessions[order.rank].shares.write_share(write_request(order), fd)

    def void(self, folder: str) -> None:
        self.sessions[0].void_save(VoidRequest(folder=folder, reason="a rank was lost"))

    def save(self, step: int) -> CommitRecord:
        """The step is committed, and what comes after a commit went well."""
        nonce = new_nonce()
        orders = [self.order(step, rank, nonce) for rank in range(len(self.sessions))]
        others = [self.write(order) for order in orders[1:]]
        self.write(orders[0])
        committed, after = self.sessions[0].commit_save(
            CommitRequest(
                folder=orders[0].folder,
                others=tuple(written.manifest for written in others),
                duration_millis=1,
            )
        )
        done(after)
        assert self.sessions[0]._upkeep.complaint is None
        return committed.record


def _contents(store: Store, record: CommitRecord) -> bytes:
    """All of `model.w` as a restore reads it. Every other byte of the checkpoint is verified too.

    Raises TornCheckpointError.
    """
    manifests = read_manifests(store, record, patience=_IMPATIENT)
    reader = BlockReader(store, manifests, patience=_IMPATIENT)
    for manifest in manifests:
        for each in manifest.objects:
            reader.read_verified(each.path, 0, each.size_bytes)
    rows = sorted(merge_tensors(manifests)["model.w"].chunks, key=lambda chunk: chunk.offsets)
    return b"".join(
        reader.read_verified(row.path, row.offset_bytes + row.data_offset_bytes, 4 * _N_COLUMNS)
        for row in rows
    )


def check_root(store: Store, *, committed: int) -> None:
    """Whoever opens the root finds the commit of slot `committed`, or a newer one, and can go on.

    Every commit that the log calls live is there, bit for bit.
    """
    state = Log(store, patience=_IMPATIENT).open()
    for record in state.live:
        n_ranks = read_manifests(store, record, patience=_IMPATIENT)[0].world_size
        assert _contents(store, record) == b"".join(
            _saved_bytes(record.step, rank) for rank in range(n_ranks)
        )
    if committed >= 0:
        assert state.head is not None, "no commit is left"
        assert state.head >= committed, (
            f"HEAD is slot {state.head}; the answer was that slot {committed} is committed"
        )
    following = Companions(store.uri, 1, last=1)
    following.begin()
    assert following.claim.slot == state.tail + 1
    last = following.save(1000)
    assert [record.slot for record in Log(store, patience=_IMPATIENT).open().live] == [last.slot]
    assert _contents(store, last) == _saved_bytes(1000, 0)
