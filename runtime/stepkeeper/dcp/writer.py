"""For `dcp.save` and `dcp.async_save`: a checkpoint that is never torn."""

import os
import pickle
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final, final

from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.futures import Future
from typing_extensions import override

from stepkeeper.checkpoint import SaveOrder, Structure
from stepkeeper.checkpoint.dcp_format.metadata import METADATA_NAME
from stepkeeper.checkpoint.manifest import BLOCK_BYTES, Manifest, ObjectRecord, is_object_name, manifest_name
from stepkeeper.checkpoint.structure_cache import inventory_of
from stepkeeper.checkpoint.writing import files_for, manifest_of, write_files
from stepkeeper.dcp.folder import Folder, Location, is_folder_name, open_folder, uri_of
from stepkeeper.dcp.shares import Share, joined_manifest, with_places
from stepkeeper.errors import BadUriError, ObjectExistsError, SaveError, TransientStorageError
from stepkeeper.log.entries import new_nonce
from stepkeeper.loggers import logger
from stepkeeper.storage.crc import block_crcs
from stepkeeper.storage.retry import DEFAULT_PATIENCE, Patience

__all__ = ["StorageWriter"]

_log: Final = logger(__name__)
_DATA: Final = re.compile(r"__([0-9]+)_([0-9]+)\.distcp")
_VERSION: Final = "1.0.0"
"""Of DCP's format, as torch 2.9 writes it."""


@final
class StorageWriter(storage.StorageWriter):
    """Writes what `dcp.save` and `dcp.async_save` save into the folder that the caller names: a path, or any URI.

    Several objects at a time, each durable before the save goes on; `.metadata` is put last and whole. So a
    checkpoint that can be read is whole, however the job was killed; and one that was there before can be read until
    all of the new one is durable. torch's FileSystemReader reads it, stepkeeper.dcp.StorageReader also verifies it.

    That is all: no log says which checkpoint is the newest, nobody fences a job that was replaced, agrees with the
    other ranks on what to resume from, or deletes old ones. CheckpointManager does.

    One writer serves many saves, one after another, as torch's own: give `checkpoint_id` to each.
    """

    def __init__(
        self, path: Location | None = None, *, overwrite: bool = True, patience: Patience = DEFAULT_PATIENCE
    ) -> None:
        """`overwrite`: a checkpoint that is there is replaced; else the save is refused before anything is written.

        Raises:
            BadUriError: it says what to write instead.

        """
        self._location = path
        self._overwrite = overwrite
        self._patience = patience
        self._save_id = new_nonce()
        if path is not None:
            uri_of(path)

    @property
    def checkpoint_id(self) -> Location | None:
        """What the next save is going to be called."""
        return self._location

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: Location) -> bool:
        """Whether that is a folder's name: of a store that is known, in a form that is safe."""
        return is_folder_name(checkpoint_id)

    @override
    def reset(self, checkpoint_id: Location | None = None) -> None:
        """What comes is another save, into `checkpoint_id` if that is given."""
        if checkpoint_id is not None:
            uri_of(checkpoint_id)
            self._location = checkpoint_id

    @override
    def storage_meta(self) -> StorageMeta:
        """What planners are told of the save."""
        name = None if self._location is None else os.fspath(self._location)
        return StorageMeta(checkpoint_id=name, save_id=self._save_id)

    @override
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raises SaveError if the save is one without coordination of the ranks."""
        if not kwargs.get("use_collectives", True):
            raise SaveError(
                "with use_collectives=False no rank knows when all have written: leave it out, or save with torch's "
                "FileSystemWriter"
            )

    @override
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan

    @override
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Each rank knows its number, by which its objects are named.

        Raises:
            ObjectExistsError: a checkpoint is there, and may not be replaced.
            StorageError: the store gave no answer, or refused.

        """
        with self._open() as folder:
            there = folder.path(METADATA_NAME)
            if any(stat.path == there for stat in self._patience.retry(lambda: folder.list(there))):
                if not self._overwrite:
                    raise ObjectExistsError(
                        f"{folder.own_uri} holds a checkpoint, and overwrite=False: save to another folder"
                    )
                _log.warning("%s holds a checkpoint, which is going to be replaced", folder.own_uri)
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[storage.WriteResult]]:
        """This rank's objects are durable.

        Raises:
            SaveError: a planner gave other elements than it had planned.
            ValueError: a tensor is of a dtype that can't be saved.
            StorageError: the store gave no answer, or refused.

        """
        share = Share(plan.items, planner.resolve_data)
        order = SaveOrder(
            rank=int(plan.storage_data),
            world_size=1,
            step=0,
            claim=0,
            nonce=self._save_id,
            structure=Structure.of(share.tensors),
            values=share.values,
        )
        with self._open() as folder:
            taken = self._numbers_taken(folder, order.rank)
            files = [
                replace(file, name=f"__{order.rank}_{taken + number}.distcp")
                for number, file in enumerate(files_for(folder, order))
            ]
            objects = write_files(folder, folder.name, files, share, patience=self._patience)
        results = [
            storage.WriteResult(
                index=item.index,
                size_in_bytes=sum(piece.length_bytes for piece in written.pieces),
                storage_data=written,
            )
            for item, written in share.written(files, manifest_of(order, inventory_of(files), objects))
        ]
        future: Future[list[storage.WriteResult]] = Future()
        future.set_result(results)
        return future

    @override
    def finish(self, metadata: Metadata, results: list[list[storage.WriteResult]]) -> None:
        """The checkpoint can be read, and survives a power cut; of an earlier one in the folder nothing is left.

        Raises:
            ObjectExistsError: somebody else has finished another checkpoint there meanwhile.
            StorageError: the store gave no answer, refused, or doesn't show here what the other ranks have written.

        """
        written = {each.index: each.storage_data for of_rank in results for each in of_rank}
        whole = with_places(replace(metadata, version=_VERSION), written)
        whole.storage_meta = self.storage_meta()
        data = pickle.dumps(whole)
        own = ObjectRecord(path=METADATA_NAME, size_bytes=len(data), blocks=block_crcs([data], BLOCK_BYTES))
        manifest = joined_manifest(written.values(), nonce=self._save_id, more=(own,))
        with self._open() as folder:
            self._finish(folder, data, manifest)
        self._save_id = new_nonce()

    def _finish(self, folder: Folder, metadata: bytes, manifest: Manifest) -> None:
        written = {each.path: each.size_bytes for each in manifest.objects if each.path != METADATA_NAME}
        listed = self._patience.retry(lambda: self._listed(folder, written))
        old = {name for name in listed if is_object_name(name) and name not in written}
        # Without its `.metadata` the earlier checkpoint isn't there; from here to the put of the new one none is.
        data = sorted(name for name in old if _DATA.fullmatch(name))
        self._delete(folder, sorted(old.difference(data)))
        self._put(folder, manifest_name(0), manifest.to_json())
        self._put(folder, METADATA_NAME, metadata)
        self._delete(folder, data)

    def _put(self, folder: Folder, name: str, data: bytes) -> None:
        """The object holds these bytes, whole and durably."""
        path = folder.path(name)
        if self._patience.retry(lambda: folder.put_if_absent(path, data)):
            return
        # A try before may have got through without an answer.
        if self._patience.retry(lambda: folder.read(path)) != data:
            raise ObjectExistsError(
                f"{folder.own_uri}/{name} was put by somebody else meanwhile: two jobs save into one folder"
            )

    def _delete(self, folder: Folder, names: Iterable[str]) -> None:
        for path in map(folder.path, names):
            self._patience.retry(partial(folder.delete, path))

    def _numbers_taken(self, folder: Folder, rank: int) -> int:
        """Objects of this rank that are there, of an earlier checkpoint or a save that was killed, keep their names."""
        names = self._patience.retry(lambda: self._listed(folder, {}, f"__{rank}_"))
        found = map(_DATA.fullmatch, names)
        return max((int(match[2]) + 1 for match in found if match), default=0)

    @staticmethod
    def _listed(folder: Folder, expected: Mapping[str, int], prefix: str = "") -> Collection[str]:
        """What is in the folder. Raises TransientStorageError if it doesn't show what was written, by these sizes."""
        found = {stat.path.removeprefix(folder.path("")): stat for stat in folder.list(folder.path(prefix))}
        lacking = [
            name for name, size in expected.items() if name not in found or found[name].size_bytes != size
        ]
        if lacking:
            raise TransientStorageError(
                f"{folder.own_uri} doesn't show {len(lacking)} of {len(expected)} objects that the ranks have written, "
                f"the first {lacking[0]}: all hosts have to see one folder there"
            )
        return list(found)

    def _open(self) -> Folder:
        if self._location is None:
            raise BadUriError("no folder to save to: StorageWriter(path), or dcp.save(…, checkpoint_id=path)")
        return open_folder(self._location)
