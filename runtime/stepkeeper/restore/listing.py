"""List the steps that can be restored from a root, find one of them, and describe its content."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from stepkeeper.checkpoint.dcp_format.metadata import merge_tensors, merge_values
from stepkeeper.checkpoint.manifest import Manifest
from stepkeeper.checkpoint.reading import read_manifests
from stepkeeper.companion.supervisor import Companion
from stepkeeper.errors import RestoreError, TornCheckpointError
from stepkeeper.log import CommitRecord, Log, LogState
from stepkeeper.log.foreign_steps import (
    ForeignRecord,
    ForeignStep,
    Restorable,
    find_steps,
    find_steps_below,
    name_record,
)
from stepkeeper.restore.foreign.content import open_content
from stepkeeper.storage import Store

__all__ = [
    "CheckpointInfo",
    "TensorInfo",
    "describe_step",
    "find_settled_step",
    "list_steps",
    "record_uri",
    "was_deleted",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    dtype: str
    """torch's name for it without the prefix: float32."""

    shape: tuple[int, ...]
    """The shape of the whole tensor, however it was sharded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """The contents of a checkpoint."""

    sequence: int | None
    """Its slot in the log. None: another writer saved it, and the log has no entry of it."""

    step: int
    uri: str
    size_bytes: int
    tensors: Mapping[str, TensorInfo]
    values: tuple[str, ...]
    """Names of the values that aren't tensors."""


def list_steps(store: Store) -> list[int]:
    """List the steps of HEAD's line, and the foreign steps that it continues from, in ascending order."""
    state = Log(store).open()
    return _steps_in(state, find_steps_below(state, partial(find_steps, store)))


def _find_step(store: Store, step: int) -> Restorable:
    """Find the newest commit of `step` on HEAD's line, or else a foreign step. Raises RestoreError if there is none."""
    state = Log(store).open()
    record = next((record for record in state.line if record.step == step), None)
    if record is not None:
        return record
    found = find_steps_below(state, partial(find_steps, store))
    foreign = next((each for each in found if each.step == step and each.is_finished), None)
    if foreign is not None:
        # A foreign step has no entry in the log. Its slot is the next one, which the begin of a restore would get.
        return ForeignRecord(slot=state.tail + 1, step=step, folder=foreign.folder)
    steps = ", ".join(map(str, _steps_in(state, found))) or "none"
    raise RestoreError(f"{store.uri} has no commit of step {step}; its steps: {steps}")


def find_settled_step(store: Store, companion: Companion, step: int) -> Restorable:
    """Find a step as `_find_step` does, once the deletions that follow this process's own commits are made."""
    if companion.claimed_root is not None:
        # The companion answers after the work that follows the last commit, including deletions.
        companion.read_latest()
    return _find_step(store, step)


def was_deleted(store: Store, record: Restorable, *, is_pinned: Callable[[], bool] = lambda: False) -> bool:
    """Return whether the log once had this commit, but has it no longer, and no pin keeps its data."""
    if isinstance(record, ForeignRecord) or is_pinned():
        return False
    state = Log(store).open()
    return state.tail >= record.slot and state.commit_in(record.folder) is None


def record_uri(store: Store, record: Restorable) -> str:
    """Return the URI of a checkpoint's folder."""
    return f"{store.uri.rstrip('/')}/{record.folder}"


def _steps_in(state: LogState, found: tuple[ForeignStep, ...]) -> list[int]:
    return sorted({record.step for record in state.line} | {each.step for each in found if each.is_finished})


def describe_step(store: Store, step: int) -> CheckpointInfo:
    """Describe the newest commit of `step` on HEAD's line from its manifests, or another writer's step.

    Raises RestoreError if there is no such step, or if it has just been deleted, and TornCheckpointError for a bad
    manifest.
    """
    record = _find_step(store, step)
    if isinstance(record, ForeignRecord):
        contents = open_content(store, record.folder).contents
        tensors, values = contents.tensors, tuple(contents.values)
        size_bytes = sum(stat.size_bytes for stat in store.list(f"{record.folder}/"))
    else:
        manifests = _read_manifests(store, record)
        tensors, values = merge_tensors(manifests), tuple(merge_values(manifests))
        size_bytes = record.size_bytes
    return CheckpointInfo(
        sequence=None if isinstance(record, ForeignRecord) else record.slot,
        step=record.step,
        uri=record_uri(store, record),
        size_bytes=size_bytes,
        tensors={
            fqn: TensorInfo(dtype=tensor.dtype, shape=tensor.global_shape) for fqn, tensor in tensors.items()
        },
        values=values,
    )


def _read_manifests(store: Store, record: CommitRecord) -> Sequence[Manifest]:
    try:
        return read_manifests(store, record)
    except TornCheckpointError as error:
        if error.missing and was_deleted(store, record):
            raise RestoreError(f"{name_record(record)} has just been deleted: {error}") from error
        raise
