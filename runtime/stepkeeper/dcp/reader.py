"""Read checkpoints for `dcp.load`: several parts at a time, straight into place, and verified."""

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any, Final, final

from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future
from typing_extensions import override

from stepkeeper.checkpoint.blocks import BlockTable
from stepkeeper.checkpoint.dcp_format.metadata import METADATA_NAME
from stepkeeper.checkpoint.inventory import ChunkRecord
from stepkeeper.checkpoint.manifest import Manifest, manifest_name
from stepkeeper.checkpoint.reading import BlockReader, list_other_refs, read_manifest
from stepkeeper.checkpoint.reread import read_if_present
from stepkeeper.dcp.folder import Folder, Located, Location, folder_uri
from stepkeeper.dcp.load_targets import LoadTargets
from stepkeeper.errors import BadItem, RestoreError, TornCheckpointError
from stepkeeper.log.entries import new_nonce
from stepkeeper.loggers import logger
from stepkeeper.restore.filling import STREAMS, Filling
from stepkeeper.restore.foreign.content import ForeignContent
from stepkeeper.restore.progress import RestoreProgress
from stepkeeper.storage.crc import crc32c
from stepkeeper.storage.retry import DEFAULT_PATIENCE, Patience
from stepkeeper_planners.errors import MetadataDecodeError
from stepkeeper_planners.pickles.dcp_metadata import check_metadata, read_metadata

__all__ = ["StorageReader"]

_log: Final = logger(__name__)


@final
class StorageReader(Located, storage.StorageReader):
    """Read what `dcp.load` loads, from a folder at a path or any URI, by any writer.

    A checkpoint by stepkeeper's StorageWriter or CheckpointManager (`stepkeeper path` prints its folder) is
    verified block by block as it is read. Of a checkpoint by torch's FileSystemWriter, the checksums within each
    tensor's file are verified. No code in `.metadata` is run. The planner decides how values are decoded; torch's
    own planner unpickles them.

    Tensors are filled as their bytes arrive. After a failed load they are part old, part new.
    """

    _does = "load from: use StorageReader(path), or dcp.load"

    def __init__(self, path: Location | None = None, *, patience: Patience = DEFAULT_PATIENCE) -> None:
        """Prepare to read; nothing is read yet.

        Args:
            path: The folder's path or URI; None takes the `checkpoint_id` of each load.
            patience: How long to retry while the store doesn't answer.

        Raises:
            BadUriError: `path` names no store. The message suggests what to write instead.

        Ranks:
            Each rank makes one with the same arguments, and `dcp.load` calls its methods.
        """
        super().__init__(path)
        self._patience = patience
        self._load_id = new_nonce()
        self._metadata: Metadata | None = None
        self._manifests: tuple[Manifest, ...] = ()
        self._failure: Exception | None = None

    @override
    def reset(self, checkpoint_id: Location | None = None) -> None:
        """Prepare for another load, from `checkpoint_id` if it is given. Raises BadUriError if that names no store."""
        super().reset(checkpoint_id)
        self._load_id = new_nonce()
        self._metadata, self._manifests, self._failure = None, (), None

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the checkpoint's metadata.

        Returns:
            The checkpoint's metadata, with names, shapes, dtypes, and where everything is stored.

        Raises:
            RestoreError: There is no checkpoint, or one whose save hasn't ended.
            TornCheckpointError: The checkpoint is damaged.
            StorageError: The store gave no answer, or refused.
        """
        if self._failure is not None and "rank" in kwargs:
            # After any Exception `dcp.load` assumes that each rank has metadata of its own, and requests that.
            raise CheckpointException("read_metadata", {int(kwargs["rank"]): _wrap_exception(self._failure)})
        self._failure = None
        try:
            with self._open() as folder:
                metadata, self._manifests = _read(folder, self._patience)
        except Exception as error:
            self._failure = error
            raise
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self._load_id
        return metadata

    @override
    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Keep the metadata for the reads that follow."""
        self._metadata = metadata

    @override
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    @override
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read everything in this rank's plan into the planner's memory.

        Returns:
            A future that is done already.

        Raises:
            TornCheckpointError: Bytes of the checkpoint are bad; the message names the object.
            RestoreError: Something is stored in an unsupported form.
            StorageError: The store gave no answer, or refused.
        """
        assert self._metadata is not None
        with self._open() as folder:
            if self._manifests:
                reader = BlockReader(folder, self._manifests, patience=self._patience, folder=folder.name)
                table = BlockTable.from_manifests(self._manifests)
                order: Sequence[int] = table.order_for_reading(self._manifests)
                tensors = (tensor for manifest in self._manifests for tensor in manifest.tensors)
                chunks = {
                    (each.path, each.offset_bytes): each for tensor in tensors for each in tensor.chunks
                }
                blobs = self._fill(reader, table, order, chunks, items=plan.items, planner=planner)
            else:
                content = ForeignContent(folder, folder.name, self._metadata, self._patience)
                table, order = content.contents.table, content.contents.reading_order
                # Values are read below, as they are: the planner decodes them.
                items = [item for item in plan.items if item.type == LoadItemType.TENSOR]
                blobs = self._fill(content, table, order, content.find_chunks(), items=items, planner=planner)
            for item in plan.items:
                if item.type == LoadItemType.BYTE_IO:
                    blob = blobs.get(item.storage_index.fqn)
                    planner.load_bytes(item, BytesIO(self._value(folder, item) if blob is None else blob))
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _fill(
        self,
        reader: BlockReader | ForeignContent,
        table: BlockTable,
        order: Sequence[int],
        chunks: Mapping[tuple[str, int], ChunkRecord],
        *,
        items: Sequence[ReadItem],
        planner: LoadPlanner,
    ) -> dict[str, bytes]:
        """Fill the planner's tensors, and return the values that were read."""
        assert self._metadata is not None
        places = LoadTargets(self._metadata, table, chunks, items, planner).places
        n_streams = STREAMS
        if isinstance(reader, ForeignContent):
            reader.check_kinds(places.by_block)
            n_streams = reader.n_streams
        progress = RestoreProgress(folder_uri(self._location or ""))
        filling = Filling(reader, table, places, progress=progress, n_streams=n_streams)
        filling.run({number: () for number in order if number in places.by_block})
        return {name: value.data.tobytes() for name, value in places.values.items()}

    def _value(self, folder: Folder, item: ReadItem) -> bytes:
        assert self._metadata is not None
        info = self._metadata.storage_data[item.storage_index]
        name, path = item.storage_index.fqn, folder.path(info.relative_path)
        if getattr(info, "transform_descriptors", None):
            raise RestoreError(
                f"{folder.own_uri}: {name} was stored compressed or otherwise changed "
                f"({info.transform_descriptors}): load it with torch's FileSystemReader"
            )
        data = self._patience.retry(lambda: read_if_present(folder, path, info.offset, info.length))
        if data is None or len(data) != info.length:
            fault = "is missing" if data is None else "is cut short"
            raise TornCheckpointError(
                f"{folder.own_uri}: {name}: {info.relative_path} {fault}",
                BadItem(folder=folder.name, name=name),
            )
        return data


def _read(folder: Folder, patience: Patience) -> tuple[Metadata, tuple[Manifest, ...]]:
    """Read the metadata, and the manifests that prove it if the checkpoint has some."""
    where = f"{folder.own_uri}/{METADATA_NAME}"
    item = BadItem(folder=folder.name, name=METADATA_NAME)
    data = patience.retry(lambda: read_if_present(folder, folder.path(METADATA_NAME)))
    if data is None:
        raise RestoreError(
            f"{where} isn't there: {folder.own_uri} holds no checkpoint, or one whose save didn't finish"
        )
    first = patience.retry(lambda: read_if_present(folder, folder.path(manifest_name(0))))
    manifest = None if first is None else Manifest.from_json(first, f"{folder.own_uri}/{manifest_name(0)}")
    try:
        metadata = read_metadata(data, name=where)
        check_metadata(metadata, name=where)
    except MetadataDecodeError as error:
        raise TornCheckpointError(str(error), item) from error
    if manifest is None or not _is_of(manifest, metadata):
        if manifest is not None:
            _log.info("%s: %s belongs to an earlier checkpoint there", folder.own_uri, manifest_name(0))
        return metadata, ()
    listed = {record.path: record for record in manifest.objects}
    own = listed.get(METADATA_NAME)
    if own is None or (own.size_bytes, own.crc32c) != (len(data), crc32c(data)):
        raise TornCheckpointError(f"{where} is not what was written: its checksum differs", item)
    refs = list_other_refs(manifest, folder.own_uri)
    others = (read_manifest(folder, folder.name, ref, patience=patience) for ref in refs)
    return metadata, (manifest, *others)


def _is_of(manifest: Manifest, metadata: Metadata) -> bool:
    """Return whether the two belong to one save: another writer may have replaced our checkpoint."""
    save_id = getattr(metadata.storage_meta, "save_id", None)
    # A checkpoint by CheckpointManager has no such id, and is alone in its folder.
    return save_id is None or save_id == manifest.nonce
