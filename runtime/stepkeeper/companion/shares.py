"""Write, stage and upload one rank's shares of saves in the companion process.

A share is what this rank writes of a save. With a local disk it is staged there first, and uploaded to the root later.
"""

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

from stepkeeper.checkpoint.layout_cache import LayoutCache
from stepkeeper.checkpoint.manifest import Manifest
from stepkeeper.checkpoint.orders import SaveOrder, Structure
from stepkeeper.checkpoint.writing import write_checkpoint
from stepkeeper.companion.messages import OpenRequest, Staged, UploadRequest, WriteRequest, Written
from stepkeeper.errors import CompanionError
from stepkeeper.storage import Store
from stepkeeper.storage.retry import Patience
from stepkeeper.tier import LocalStaging, LocalTier

__all__ = ["ShareWriter"]


class ShareWriter:
    """Write the shares of one rank, and remember which save's share is written or staged."""

    def __init__(self, opening: OpenRequest, store: Store, *, patience: Patience) -> None:
        self._opening = opening
        self._patience = patience
        self._store = store
        self._staging: LocalStaging | None = None
        if opening.tier is not None:
            self._staging = LocalStaging(store, LocalTier(opening.tier, store.uri), patience=patience)
        self._staging_fails = False
        """True if the last share couldn't be staged: the reason is reported once."""

        self.layout_cache = LayoutCache()
        self._staged: dict[str, tuple[SaveOrder, Manifest]] = {}
        """By folder, the share that is on the local disk and not in the root yet."""

        self._written: dict[str, tuple[SaveOrder, Manifest]] = {}
        """By folder, the share that is in the root and not committed yet."""

    def write_share(self, body: WriteRequest, region_fd: int) -> Written:
        """Write this rank's share durably, with its manifest; rank 0's is written later, for the commit."""
        order = self.complete_order(body)
        with _map_region(region_fd) as data:
            manifest = write_checkpoint(
                self._store, order, data, cache=self.layout_cache, patience=self._patience
            )
        self._written = {manifest.folder: (order, manifest)}
        return Written(size_bytes=manifest.size_bytes, manifest=manifest.make_ref())

    def stage_share(self, body: WriteRequest, region_fd: int) -> Staged:
        """Write this rank's share to the local disk, for `upload_share`. A failure leaves nothing there."""
        self._staged = {}
        if self._staging is None:
            raise CompanionError("there is no local tier to stage saves in")
        order = self.complete_order(body)
        try:
            with _map_region(region_fd) as data:
                manifest = self._staging.stage(order, data, cache=self.layout_cache)
        except OSError as error:
            why_not = None if self._staging_fails else str(error)
            self._staging_fails = True
            return Staged(held=False, why_not=why_not)
        self._staging_fails = False
        self._staged = {manifest.folder: (order, manifest)}
        return Staged(held=True)

    def upload_share(self, body: UploadRequest) -> Written:
        """Upload the staged share, as `write_share` would write it. Raises SaveError if the disk has lost it."""
        if self._staging is None or body.folder not in self._staged:
            raise CompanionError(f"nothing was staged for {body.folder} by this companion process")
        order, manifest = self._staged[body.folder]
        self._staging.upload(manifest)
        self._staged = {}
        self._written = {manifest.folder: (order, manifest)}
        return Written(size_bytes=manifest.size_bytes, manifest=manifest.make_ref())

    def take_written(self, folder: str) -> tuple[SaveOrder, Manifest]:
        """Return the order and the manifest of the share in `folder`, and forget them."""
        if folder not in self._written:
            raise CompanionError(f"nothing was written to {folder} by this companion process")
        return self._written.pop(folder)

    def forget_share(self, folder: str) -> None:
        """Forget the share in `folder`, written or staged."""
        self._written.pop(folder, None)
        self._staged.pop(folder, None)

    def complete_order(self, body: WriteRequest) -> SaveOrder:
        """Complete the request's order with the structure that this process holds."""
        if body.structure is not None:
            self.layout_cache.hold_structure(Structure.from_text(body.structure))
        structure = self.layout_cache.find_structure(body.structure_key)
        if structure is None:
            raise CompanionError(
                f"nothing was written to {body.folder}: the request names an unknown structure"
            )
        return body.order(structure, rank=self._opening.rank, world_size=self._opening.world_size)


@contextmanager
def _map_region(fd: int) -> Iterator[memoryview]:
    """Map the memory of `fd`, as long as there is a reference to it."""
    size_bytes = os.fstat(fd).st_size
    yield memoryview(mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ) if size_bytes else b"")
