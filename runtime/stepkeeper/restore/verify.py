"""Verify a commit: read every byte of it again and compare it with its checksum, each rank its share."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from stepkeeper.checkpoint.blocks import BlockTable
from stepkeeper.checkpoint.manifest import Manifest, manifest_name
from stepkeeper.checkpoint.reading import BlockReader, prove_manifests, read_manifest_bytes
from stepkeeper.companion.supervisor import Companion
from stepkeeper.errors import RestoreError, TornCheckpointError
from stepkeeper.log import CommitRecord
from stepkeeper.log.foreign_steps import ForeignRecord, name_record
from stepkeeper.restore.filling import Filling
from stepkeeper.restore.listing import find_settled_step, record_uri, was_deleted
from stepkeeper.restore.peers.exchange import Exchange, exchange_among
from stepkeeper.restore.placing import Places
from stepkeeper.restore.progress import RestoreProgress
from stepkeeper.restore.restorer import Restorer
from stepkeeper.restore.second_read import confirm_bad

__all__ = ["Verification", "verify_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """A commit whose every byte is as it was written."""

    sequence: int
    """Its slot in the log."""

    step: int
    uri: str
    n_objects: int
    size_bytes: int
    """The size of all its objects; all of these bytes were read."""


def verify_step(restorer: Restorer, companion: Companion, step: int) -> Verification:
    """Read every byte of the newest commit of `step` on HEAD's line, each in one of the ranks, and compare it.

    Nothing is appended to the log, and nothing is condemned. Raises RestoreError if there is no such commit,
    it is another writer's, which has no checksums, or it was deleted meanwhile; TornCheckpointError;
    BadNodeError if one node reads bad bytes where another one reads good ones.
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
        self._waits = restorer.waits
        self.n_objects = 0
        self.size_bytes = 0

    def read(self) -> dict[str, Any]:
        """Read this rank's share, and compare it with the manifests. Raises TornCheckpointError."""

        def prove(stored: Sequence[bytes]) -> tuple[Sequence[Manifest], int]:
            return prove_manifests(stored, self._record, self._store.uri), sum(map(len, stored))

        manifests, manifest_bytes = self._exchange.share_manifests(
            lambda: read_manifest_bytes(self._store, self._record), prove
        )
        # The manifests were compared with the commit's entry already.
        proven = {manifest_name(rank) for rank in range(len(manifests))}
        others = [o for manifest in manifests for o in manifest.objects if o.path not in proven]
        self.n_objects = len(proven) + len(others)
        self.size_bytes = manifest_bytes + sum(record.size_bytes for record in others)
        table, rank_group = BlockTable.from_objects(others), self._exchange.rank_group
        places = Places()
        for block in table.blocks[rank_group.rank :: rank_group.world_size]:
            places.add_checked(block)
        filling = Filling(
            BlockReader(self._store, manifests),
            table,
            places,
            progress=RestoreProgress(f"step {self._record.step}", step=self._record.step, doing="verifying"),
            waits=self._waits,
            rank_group=rank_group,
        )
        filling.run(dict.fromkeys(places.by_block, ()))
        return {}
