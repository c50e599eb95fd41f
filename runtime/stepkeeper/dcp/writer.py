"""Write checkpoints for `dcp.save` and `dcp.async_save` so that they are never torn."""

import os
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

from stepkeeper.checkpoint.dcp_format.metadata import METADATA_NAME
from stepkeeper.checkpoint.layout_cache import build_inventory
from stepkeeper.checkpoint.manifest import BLOCK_BYTES, Manifest, ObjectRecord, is_object_name, manifest_name
from stepkeeper.checkpoint.orders import SaveOrder, Structure
from stepkeeper.checkpoint.writing import build_manifest, plan_files, write_files
from stepkeeper.dcp.folder import Folder, Located, Location
from stepkeeper.dcp.shares import Share, add_storage_places, join_manifests, pickle_metadata
from stepkeeper.errors import ObjectExistsError, SaveError, TransientStorageError
from stepkeeper.log.entries import new_nonce
from stepkeeper.loggers import logger
from stepkeeper.storage.crc import block_crcs
from stepkeeper.storage.retry import DEFAULT_PATIENCE, Patience

__all__ = ["StorageWriter"]

_log: Final = logger(__name__)
_DATA: Final = re.compile(r"__([0-9]+)_([0-9]+)\.distcp")
_VERSION: Final = "1.0.0"
"""Version of DCP's format, as torch 2.9 writes it."""


@final
class StorageWriter(Located, storage.StorageWriter):
    """Write what `dcp.save` and `dcp.async_save` save, into a folder at a path or any URI.

    Several objects are written at a time, and each is durable before the save continues; `.metadata` is put last and
    whole. So a checkpoint that can be read is whole, however the job was killed. A checkpoint that was in the folder
    before can be read until all of the new one is durable. torch's FileSystemReader reads the result;
    stepkeeper.dcp.StorageReader also verifies it.

    That is all: no log records which checkpoint is the newest, a job that was replaced is not fenced, ranks don't agree
    on what to resume from, and old checkpoints are not deleted. CheckpointManager does all this.

    One writer serves many saves, one after another, as torch's own does: pass `checkpoint_id` to each.
    """

    _does = "save to: StorageWriter(path), or dcp.save"

    def __init__(
        self, path: Location | None = None, *, overwrite: bool = True, patience: Patience = DEFAULT_PATIENCE
    ) -> None:
        """Prepare to write; nothing is written yet.

        Args:
            path: The folder's path or URI; None takes the `checkpoint_id` of each save.
            overwrite: Replace a checkpoint that is in the folder. If False, such a save is refused before anything
                is written.
            patience: How long to retry while the store doesn't answer.

        Raises:
            BadUriError: `path` names no store. The message suggests what to write instead.

        Ranks:
            Each rank makes one with the same arguments, and `dcp.save` calls its methods.
        """
        super().__init__(path)
        self._overwrite = overwrite
        self._patience = patience
        self._save_id = new_nonce()

    @override
    def storage_meta(self) -> StorageMeta:
        """Return the name and id of the save, for planners and `.metadata`."""
        name = None if self._location is None else os.fspath(self._location)
        return StorageMeta(checkpoint_id=name, save_id=self._save_id)

    @override
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Check that the ranks coordinate the save.

        Raises:
            SaveError: The save is one with use_collectives=False.
        """
        if not kwargs.get("use_collectives", True):
            raise SaveError(
                "with use_collectives=False no rank knows when all have written: leave it out, or save with torch's "
                "FileSystemWriter"
            )

    @override
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    @override
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give each rank its number, which its objects' names contain. Runs on the coordinator.

        Raises:
            ObjectExistsError: The folder holds a checkpoint, and `overwrite` is False.
            StorageError: The store gave no answer, or refused.
        """
        with self._open() as folder:
            there = folder.path(METADATA_NAME)
            if any(stat.path == there for stat in self._patience.retry(lambda: folder.list(there))):
                if not self._overwrite:
                    raise ObjectExistsError(
                        f"{folder.own_uri} holds a checkpoint, and overwrite=False: save to another folder"
                    )
                _log.warning("%s holds a checkpoint, which will be replaced", folder.own_uri)
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[storage.WriteResult]]:
        """Write this rank's objects durably.

        Returns:
            A future that is done already, with where each item is stored.

        Raises:
            SaveError: The planner returned other elements than planned.
            ValueError: A tensor is of a dtype that can't be saved.
            StorageError: The store gave no answer, or refused.
        """
        share = Share(plan.items, planner.resolve_data)
        order = SaveOrder(
            rank=int(plan.storage_data),
            world_size=1,
            step=0,
            claim=0,
            nonce=self._save_id,
            structure=Structure(tensors=share.tensors),
            values=share.values,
        )
        with self._open() as folder:
            # The objects of a checkpoint that is in the folder stay until this one is complete.
            first = self._next_file_number(folder, order.rank)
            files = [
                replace(file, name=f"__{order.rank}_{first + number}.distcp")
                for number, file in enumerate(plan_files(folder, order))
            ]
            objects = write_files(folder, folder.name, files, share, patience=self._patience)
        results = [
            storage.WriteResult(
                index=item.index,
                size_in_bytes=sum(piece.length_bytes for piece in written.pieces),
                storage_data=written,
            )
            for item, written in share.locate_items(
                files, build_manifest(order, build_inventory(files), objects)
            )
        ]
        future: Future[list[storage.WriteResult]] = Future()
        future.set_result(results)
        return future

    @override
    def finish(self, metadata: Metadata, results: list[list[storage.WriteResult]]) -> None:
        """Put `.metadata`, and delete the rest of an earlier checkpoint in the folder. Runs on the coordinator.

        Afterwards the checkpoint can be read, and survives a power cut.

        Raises:
            ObjectExistsError: Another process has finished another checkpoint there meanwhile.
            StorageError: The store gave no answer, refused, or doesn't show the other ranks' objects here.
        """
        written = {each.index: each.storage_data for of_rank in results for each in of_rank}
        whole = add_storage_places(replace(metadata, version=_VERSION), written)
        whole.storage_meta = self.storage_meta()
        data = pickle_metadata(whole)
        own = ObjectRecord(path=METADATA_NAME, size_bytes=len(data), blocks=block_crcs([data], BLOCK_BYTES))
        manifest = join_manifests(written.values(), nonce=self._save_id, more=(own,))
        with self._open() as folder:
            self._finish(folder, data, manifest)
        self._save_id = new_nonce()

    def _finish(self, folder: Folder, metadata: bytes, manifest: Manifest) -> None:
        written = {each.path: each.size_bytes for each in manifest.objects if each.path != METADATA_NAME}
        listed = self._patience.retry(lambda: self._listed(folder, written))
        old = {name for name in listed if is_object_name(name) and name not in written}
        # Without its `.metadata` the earlier checkpoint is gone: until the new one is put there is none.
        data = sorted(name for name in old if _DATA.fullmatch(name))
        self._delete(folder, sorted(old.difference(data)))
        self._put(folder, manifest_name(0), manifest.to_json())
        self._put(folder, METADATA_NAME, metadata)
        self._delete(folder, data)

    def _put(self, folder: Folder, name: str, data: bytes) -> None:
        """Put the object, whole and durably; it may hold these bytes already."""
        path = folder.path(name)
        if self._patience.retry(lambda: folder.put_if_absent(path, data)):
            return
        # An earlier try may have gone through without an answer.
        if self._patience.retry(lambda: folder.read(path)) != data:
            raise ObjectExistsError(
                f"{folder.own_uri}/{name} was written by another process meanwhile: two jobs save into one folder"
            )

    def _delete(self, folder: Folder, names: Iterable[str]) -> None:
        for path in map(folder.path, names):
            self._patience.retry(partial(folder.delete, path))

    def _next_file_number(self, folder: Folder, rank: int) -> int:
        """Return the first number that no object of this rank, such as one of a killed save, has."""
        names = self._patience.retry(lambda: self._listed(folder, {}, f"__{rank}_"))
        found = map(_DATA.fullmatch, names)
        return max((int(match[2]) + 1 for match in found if match), default=0)

    @staticmethod
    def _listed(folder: Folder, expected: Mapping[str, int], prefix: str = "") -> Collection[str]:
        """List the folder. Raises TransientStorageError unless it has the `expected` objects and sizes."""
        found = {stat.path.removeprefix(folder.path("")): stat for stat in folder.list(folder.path(prefix))}
        lacking = [
            name for name, size in expected.items() if name not in found or found[name].size_bytes != size
        ]
        if lacking:
            raise TransientStorageError(
                f"{folder.own_uri} doesn't list {len(lacking)} of {len(expected)} objects that the ranks have "
                f"written, the first {lacking[0]}: all hosts must share one folder there"
            )
        return list(found)
