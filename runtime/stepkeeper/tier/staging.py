# mypy: disable-error-code="explicit-override"
# typing has override from Python 3.12 on.
"""Stage one rank's saves on a local disk: a save is first written there as a whole, then uploaded to the root.

Only the root is durable.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, final

from stepkeeper.checkpoint.dcp_format.dtypes import size_in_bytes
from stepkeeper.checkpoint.layout_cache import LayoutCache
from stepkeeper.checkpoint.manifest import BLOCK_BYTES, Manifest, ObjectRecord, manifest_name
from stepkeeper.checkpoint.orders import SaveOrder
from stepkeeper.checkpoint.writing import write_checkpoint
from stepkeeper.errors import SaveError
from stepkeeper.storage.base import Buffer, Store, StreamedStore
from stepkeeper.storage.crc import block_crcs
from stepkeeper.storage.retry import DEFAULT_PATIENCE, Patience
from stepkeeper.tier.cached_store import CachedStore
from stepkeeper.tier.disk import LocalTier

__all__ = ["LocalStaging"]

_STREAMS: Final = 8
_AT_ONCE: Final = Patience(total_s=0.0)
"""No retries: a save that the disk can't hold now is written to the root directly."""


@final
class LocalStaging:
    """Stage the saves of one rank."""

    def __init__(self, root: Store, tier: LocalTier, *, patience: Patience = DEFAULT_PATIENCE) -> None:
        self._root = root
        self._tier = tier
        self._patience = patience
        self._unfinished: str | None = None
        """The folder of a save that was staged but isn't at the root."""

    def stage(self, order: SaveOrder, data: memoryview, *, cache: LayoutCache | None = None) -> Manifest:
        """Write the whole order to the local disk, not durably, so that `data` is no longer needed.

        Raises OSError if that fails; then nothing is left there.
        """
        size_bytes = sum(size_in_bytes(each.dtype, each.sizes) for each in order.tensors)
        size_bytes += sum(each.length_bytes for each in order.values)
        if self._unfinished is not None:
            # That save failed, so that its copies will never be read. Those of earlier commits may be.
            self._tier.drop(self._unfinished)
        self._unfinished = order.folder
        self._tier.make_room(order.folder, order.rank, size_bytes)
        store = _StagingStore(self._root, self._tier)
        try:
            return write_checkpoint(store, order, data, cache=cache, patience=_AT_ONCE)
        except BaseException:
            for path in store.staged:
                self._tier.forget(path)
            raise

    def upload(self, manifest: Manifest) -> None:
        """Upload the staged objects durably, then the manifest; rank 0's is left to the commit. Can be retried.

        Raises SaveError if the disk doesn't return the bytes that were put there, or StorageError.
        """
        streams = self._root.streams if isinstance(self._root, StreamedStore) else _STREAMS
        with ThreadPoolExecutor(streams, thread_name_prefix="stepkeeper-upload") as pool:
            list(pool.map(lambda record: self._upload(manifest.folder, record), manifest.objects))
        if manifest.rank != 0:
            path = f"{manifest.folder}/{manifest_name(manifest.rank)}"
            self._patience.retry(lambda: self._root.write(path, [manifest.to_json()]))
        self._unfinished = None

    def _upload(self, folder: str, record: ObjectRecord) -> None:
        path = f"{folder}/{record.path}"
        try:
            data = self._tier.map_copy(path)
        except OSError as error:
            raise SaveError(f"reading {path} back from the local disk failed: {error}") from error
        if data.nbytes != record.size_bytes or block_crcs([data], BLOCK_BYTES) != record.blocks:
            raise SaveError(
                f"{path} on the local disk differs from the bytes that were put there: the disk is faulty"
            )
        self._patience.retry(lambda: self._root.write(path, [data]))


class _StagingStore(CachedStore):
    """Write objects to the local disk, not to the root.

    Manifests are not written: they prove that objects are at the root, where these aren't yet.
    """

    def __init__(self, root: Store, tier: LocalTier) -> None:
        super().__init__(root, tier)
        self.staged: list[str] = []
        if isinstance(root, StreamedStore):
            # The number and size of its objects follow the root's streams.
            self.streams = root.streams

    def write(self, path: str, parts: Sequence[Buffer]) -> None:
        if not path.endswith(".json"):
            self.staged.append(path)
            self._tier.put(path, parts)
