"""Describe what a checkpoint holds, without reading its tensors."""

from stepkeeper.checkpoint import read_manifests
from stepkeeper.checkpoint.dcp_format.metadata import merge_tensors, merge_values
from stepkeeper.errors import RestoreError, TornCheckpointError
from stepkeeper.log.foreign_steps import ForeignRecord, name_record
from stepkeeper.restore.foreign.content import open_content
from stepkeeper.restore.listing import find_step, record_uri, was_deleted
from stepkeeper.restore.results import CheckpointInfo, TensorInfo
from stepkeeper.storage import Store

__all__ = ["describe_step"]


def describe_step(store: Store, step: int) -> CheckpointInfo:
    """Describe the newest commit of `step` on HEAD's line from its manifests, or another writer's step.

    Raises:
        RestoreError: There is no such commit; or it was deleted meanwhile.
        TornCheckpointError: A manifest is missing or bad.

    """
    record = find_step(store, step)
    if isinstance(record, ForeignRecord):
        return _describe_foreign(store, record)
    try:
        manifests = read_manifests(store, record)
    except TornCheckpointError as error:
        if error.missing and was_deleted(store, record):
            raise RestoreError(f"{name_record(record)} was deleted just now: {error}") from error
        raise
    return CheckpointInfo(
        sequence=record.slot,
        step=record.step,
        uri=record_uri(store, record),
        size_bytes=record.size_bytes,
        tensors={
            fqn: TensorInfo(dtype=tensor.dtype, shape=tensor.global_shape)
            for fqn, tensor in merge_tensors(manifests).items()
        },
        values=tuple(merge_values(manifests)),
    )


def _describe_foreign(store: Store, record: ForeignRecord) -> CheckpointInfo:
    content = open_content(store, record.folder)
    objects = store.list(f"{record.folder}/")
    return CheckpointInfo(
        sequence=None,
        step=record.step,
        uri=record_uri(store, record),
        size_bytes=sum(stat.size_bytes for stat in objects),
        tensors={
            fqn: TensorInfo(dtype=tensor.dtype, shape=tensor.global_shape)
            for fqn, tensor in content.tensors.items()
        },
        values=content.values,
    )
