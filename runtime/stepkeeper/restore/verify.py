"""Verify a commit: read every byte of it again and compare it with what was written, each rank its share."""

import threading
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Final

from stepkeeper.checkpoint import BlockReader
from stepkeeper.checkpoint.blocks import Block, BlockTable
from stepkeeper.checkpoint.manifest import Manifest, manifest_name
from stepkeeper.checkpoint.reading import prove_manifests, read_manifest_bytes
from stepkeeper.companion.supervisor import Companion
from stepkeeper.errors import RestoreError, TornCheckpointError
from stepkeeper.log import CommitRecord
from stepkeeper.log.foreign_steps import ForeignRecord, name_record
from stepkeeper.restore.listing import find_settled_step, record_uri, was_deleted
from stepkeeper.restore.peers.exchange import Exchange, exchange_among
from stepkeeper.restore.progress import RestoreProgress
from stepkeeper.restore.restorer import Restorer
from stepkeeper.restore.results import Verification
from stepkeeper.restore.second_read import confirm_bad
from stepkeeper.restore.threads import ReadingThreads

__all__ = ["share_of", "verify_step"]

_STREAMS: Final = 8


def verify_step(restorer: Restorer, companion: Companion, step: int) -> Verification:
    """Read every byte of the newest commit of `step` on HEAD's line, each in one of the ranks, and compare it.

    Nothing is appended to the log, and nothing is condemned.

    Raises:
        RestoreError: There is no such commit, or it is another writer's, which has no checksums; or it was deleted
            meanwhile.
        TornCheckpointError: Bytes of it are bad.
        BadNodeError: One node reads bad bytes where another one reads good ones.

    """
    store, rank_group = restorer.store, restorer.rank_group
    record = restorer.votes.choose_in_rank_0(partial(find_settled_step, store, companion, step))
    assert record is not None
    if isinstance(record, ForeignRecord):
        raise RestoreError(
            f"{name_record(record)} has no checksums of blocks: restore it and save, then it can be verified"
        )
    name = restorer.votes.new_name()
    with exchange_among(rank_group, name, restorer.waits) as exchange:
        verifying = _Verifying(restorer, record, exchange)
        torn = restorer.votes.act_together(f"{name}/verified", verifying.read)
        if torn is not None:
            raise TornCheckpointError(
                confirm_bad(
                    f"{name}/torn",
                    rank_group,
                    restorer.host,
                    torn.own_error,
                    restorer.reopen,
                    was_deleted=partial(was_deleted, store, record),
                    waits=restorer.waits,
                )
            )
    return Verification(
        sequence=record.slot,
        step=record.step,
        uri=record_uri(store, record),
        n_objects=verifying.n_objects,
        size_bytes=verifying.size_bytes,
    )


class _Verifying:
    """Verify one rank's share of one commit."""

    def __init__(self, restorer: Restorer, record: CommitRecord, exchange: Exchange) -> None:
        self._store, self._record, self._exchange = restorer.store, record, exchange
        self._rank_group = restorer.rank_group
        self._waits = restorer.waits
        self.n_objects = 0
        self.size_bytes = 0

    def read(self) -> dict[str, Any]:
        """Read this rank's share, and compare it with the manifests.

        Raises:
            TornCheckpointError: Bytes are bad; the error names a bad block and says how many there are.
            StorageError: The store gave no answer, or refused.

        """
        sizes: list[int] = []

        def prove(stored: Sequence[bytes]) -> Sequence[Manifest]:
            proven = prove_manifests(stored, self._record, self._store.uri)
            sizes[:] = map(len, stored)
            return proven

        manifests = self._exchange.share_manifests(
            lambda: read_manifest_bytes(self._store, self._record), prove
        )
        proven = {manifest_name(rank) for rank in range(len(manifests))}
        others = [o for manifest in manifests for o in manifest.objects if o.path not in proven]
        table = BlockTable.from_objects(others)
        self.n_objects = len(proven) + len(others)
        self.size_bytes = sum(sizes) + sum(record.size_bytes for record in others)
        bad = list(self._bad(BlockReader(self._store, manifests), table))
        if bad:
            more = f"; {len(bad)} blocks of this rank's share are bad" if len(bad) > 1 else ""
            # A deletion removes objects, it doesn't change them: an error about bytes that are there says more.
            first = next((error for error in bad if not error.missing), bad[0])
            raise TornCheckpointError(f"{first}{more}", first.bad, missing=first.missing) from first
        return {}

    def _bad(self, reader: BlockReader, table: BlockTable) -> Iterator[TornCheckpointError]:
        failed = threading.Event()

        def check(block: Block) -> TornCheckpointError | None:
            try:
                if not failed.is_set():
                    reader.read_block(block.path, block.index)
            except TornCheckpointError as error:
                return error
            except BaseException:
                failed.set()
                raise
            return None

        share = share_of(self._rank_group.rank, self._rank_group.world_size, table)
        done_bytes, total_bytes = 0, sum(table.blocks[number].size_bytes for number in share)
        with (
            self._rank_group.heartbeat() as note_moved,
            ReadingThreads(_STREAMS, self._waits, name="verify") as threads,
        ):
            progress = RestoreProgress(
                f"step {self._record.step}",
                total_bytes,
                step=self._record.step,
                doing="verifying",
                note_moved=note_moved,
            )
            checks = [(number, threads.submit(check, table.blocks[number])) for number in share]
            for number, each in checks:
                if (error := threads.await_result(each)) is not None:
                    yield error
                done_bytes += table.blocks[number].size_bytes
                progress.note_bytes(done_bytes)


def share_of(rank: int, world_size: int, table: BlockTable) -> list[int]:
    """Choose the blocks that this rank reads: neighbours, with about as many bytes as the other ranks' shares.

    Pure.
    """
    ends = list(accumulate(block.size_bytes for block in table.blocks))
    total = ends[-1] if ends else 0
    return [
        block.number
        for block, end in zip(table.blocks, ends, strict=True)
        # A block belongs to the rank in whose share its last byte is; every block has one.
        if (end - 1) * world_size // total == rank
    ]
