"""Make small committed checkpoints without torch and without a companion process."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from stepkeeper.checkpoint import (
    SaveOrder,
    Structure,
    TensorOrder,
    ValueOrder,
    finish_checkpoint,
    write_checkpoint,
)
from stepkeeper.checkpoint.manifest import Manifest
from stepkeeper.companion.messages import WriteRequest
from stepkeeper.log import Claim, CommitRecord, Log
from stepkeeper.log.entries import new_nonce
from stepkeeper.storage import Store, open_store
from stepkeeper_testing.pod import pod_identity

__all__ = ["SmallRoot", "save_small", "write_small"]

_ROW_BYTES = 32
_VALUE = b"no value that anybody reads"


def save_small(
    log: Log,
    store: Store,
    claim: Claim,
    step: int,
    *,
    world_size: int = 1,
    value: bytes = _VALUE,
    metrics: dict[str, str] | None = None,
) -> CommitRecord:
    """Write and commit a small checkpoint of `step`.

    Rank r writes row r of the float32 tensor `model.w`, of shape (world_size, 8); rank 0 also writes the value
    `step`.

    Args:
        log: The root's log.
        store: The root's store.
        claim: The claim to commit under.
        step: The step.
        world_size: Number of ranks to write as.
        value: Bytes that torch.save would have written for the value `step`.
        metrics: The step's metrics, as the log has them.

    Returns:
        The commit's record.

    Raises:
        FencedError: Another claim owns the root.
        StorageError: The store gave no answer, or refused.

    """
    own, *others = write_small(store, claim, step, world_size=world_size, value=value)
    finished = finish_checkpoint(store, own, [manifest.make_ref() for manifest in others])
    return log.commit(
        claim,
        step=step,
        folder=own.folder,
        size_bytes=finished.size_bytes,
        manifest=finished.manifest,
        metrics=metrics,
    )


def write_small(
    store: Store, claim: Claim, step: int, *, world_size: int = 1, value: bytes = _VALUE
) -> Sequence[Manifest]:
    """Write what `save_small` writes, without the commit: what a save that was given up leaves behind.

    Args:
        store: The root's store.
        claim: The claim to write under.
        step: The step.
        world_size: Number of ranks to write as.
        value: Bytes that torch.save would have written for the value `step`.

    Returns:
        The ranks' manifests, in order.

    """
    nonce = new_nonce()
    manifests = []
    for rank in range(world_size):
        row = struct.pack("<8f", *(step + rank + column for column in range(8)))
        row_order = TensorOrder(
            fqn="model.w",
            dtype="float32",
            global_shape=(world_size, 8),
            offsets=(rank, 0),
            sizes=(1, 8),
            start=0,
        )
        order = SaveOrder(
            rank=rank,
            world_size=world_size,
            step=step,
            claim=claim.slot,
            nonce=nonce,
            structure=Structure.build([row_order]),
            values=(ValueOrder(fqn="step", start=_ROW_BYTES, length_bytes=len(value)),) if rank == 0 else (),
        )
        manifests.append(write_checkpoint(store, order, memoryview(bytearray(row + value))))
    return manifests


def write_request(order: SaveOrder) -> WriteRequest:
    """Ask a companion process for what the order says, and tell it the structure."""
    return WriteRequest(
        step=order.step,
        claim=order.claim,
        nonce=order.nonce,
        values=order.values,
        structure_key=order.structure.key,
        structure=order.structure.text,
    )


@dataclass
class SmallRoot:
    """A root, and the starts of the job default/lm that save small checkpoints there.

    Args:
        url: The root's URI.

    """

    url: str
    store: Store = field(init=False)
    log: Log = field(init=False)
    claim: Claim = field(init=False)
    """The claim of the last `begin`."""

    def __post_init__(self) -> None:
        self.store = open_store(self.url)
        self.log = Log(self.store)

    def begin(self, attempt: int = 0, base: int | None = None) -> None:
        """Claim the root as the given start of the job.

        Args:
            attempt: Number of the restart.
            base: Slot of the commit to go on from; None goes on from HEAD.

        """
        self.claim = self.log.begin(pod_identity(restart_attempt=attempt), base=base, host=f"host-{attempt}")

    def save(
        self,
        step: int,
        *,
        world_size: int = 1,
        value: bytes = _VALUE,
        metrics: dict[str, str] | None = None,
    ) -> CommitRecord:
        """Write and commit a small checkpoint under the last claim, as `save_small` does."""
        return save_small(
            self.log, self.store, self.claim, step, world_size=world_size, value=value, metrics=metrics
        )

    def give_up(self, step: int) -> str:
        """Write a small checkpoint that is never committed, and return its folder."""
        return write_small(self.store, self.claim, step)[0].folder

    def contents(self) -> dict[str, bytes]:
        """Return all objects of the root, by path."""
        return {stat.path: self.store.read(stat.path) for stat in self.store.list("")}

    def change(self, path: str, data: bytes | None) -> None:
        """Replace the bytes of the object at `path`; None deletes it."""
        self.store.delete(path)
        if data is not None:
            self.store.write(path, [data])
