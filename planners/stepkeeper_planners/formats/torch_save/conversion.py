"""Convert torch.save files to checkpoints, and checkpoints to torch.save files."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stepkeeper_planners.formats.checkpoint_files import CheckpointFiles, as_checkpoint_files
from stepkeeper_planners.formats.checkpoint_reader import CheckpointReader, CheckpointTensor, open_checkpoint
from stepkeeper_planners.formats.checkpoint_writer import write_checkpoint
from stepkeeper_planners.formats.destination import new_file
from stepkeeper_planners.formats.reporting import Conversion, Progress, ProgressMeter
from stepkeeper_planners.formats.torch_save.source import open_torch_save
from stepkeeper_planners.formats.torch_save.writer import DeferredTensor, write_torch_save
from stepkeeper_planners.state.nesting import rebuild_nesting

__all__ = ["checkpoint_to_torch_save", "torch_save_to_checkpoint"]


def torch_save_to_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Convert a torch.save file to a checkpoint folder of torch.distributed.checkpoint.

    Nothing in the file is run. The file is mapped; memory for about one tensor is needed.

    Args:
        src: the torch.save file.
        dst: the checkpoint folder to write.
        overwrite: replace an existing checkpoint at `dst`.
        progress: called with the bytes of tensors that are done, and those of all tensors.

    Returns:
        The files that were written, and the tensors by their flat names.

    Raises:
        FileNotFoundError: there is no `src`.
        SourceError: it isn't a torch.save file, is damaged, or holds more than dense tensors and plain values.
        UnsupportedValueError: a value has a type that isn't stored.
        DestinationExistsError: there is something at `dst`.

    Ranks: one process, outside of a process group of several.
    """
    state = open_torch_save(Path(src))
    return write_checkpoint(state, Path(dst), source=Path(src), overwrite=overwrite, progress=progress)


def checkpoint_to_torch_save(
    src: str | os.PathLike[str] | CheckpointFiles,
    dst: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Convert a checkpoint to the file that torch.save makes of its state, with all tensors on the CPU.

    Nothing in the checkpoint is run. Memory for the values and a few small buffers is needed.

    Args:
        src: the checkpoint folder, or an object that reads its files.
        dst: the file to write.
        overwrite: replace an existing file at `dst`.
        progress: called with the bytes of tensors that are done, and those of all tensors.

    Returns:
        The file that was written, and the tensors by their flat names.

    Raises:
        SourceError: `src` isn't a checkpoint, or one of its files is missing, damaged or cut off.
        MetadataDecodeError: its metadata is damaged, contradicts itself, or would run code.
        ValueDecodeError: a value is damaged, or has a type that isn't read without running it.
        DestinationExistsError: there is something at `dst`.

    Ranks: one process.
    """
    checkpoint = open_checkpoint(as_checkpoint_files(src))
    firsts = checkpoint.find_tied()
    total_bytes = sum(checkpoint.tensors[fqn].n_bytes for fqn in set(firsts.values()))
    meter = ProgressMeter(total_bytes=total_bytes, callback=progress)
    deferred = {
        fqn: _defer_tensor(checkpoint, checkpoint.tensors[fqn], meter) for fqn in set(firsts.values())
    }
    leaves: dict[str, object] = {fqn: deferred[first] for fqn, first in firsts.items()}
    leaves.update({fqn: checkpoint.read_value(fqn) for fqn in checkpoint.values})
    where = f"{checkpoint.files.name}/.metadata"
    tree = rebuild_nesting(_restore_order(leaves, checkpoint), checkpoint.paths, where=where)
    with new_file(Path(dst), source=checkpoint.files.path, overwrite=overwrite) as file:
        write_torch_save(file, tree)
    return Conversion(
        files=(Path(dst),), tensors=tuple(checkpoint.tensors), left_out=(), tensor_bytes=total_bytes
    )


def _defer_tensor(
    checkpoint: CheckpointReader, tensor: CheckpointTensor, meter: ProgressMeter
) -> DeferredTensor:
    def read_elements() -> Iterator[memoryview]:
        for piece in checkpoint.read_elements(tensor.fqn):
            yield piece
            meter.add(len(piece))

    return DeferredTensor(
        dtype=tensor.dtype,
        shape=tensor.shape,
        n_bytes=tensor.n_bytes,
        read_elements=read_elements,
        write_order=tensor.first_location,
    )


def _restore_order(leaves: dict[str, Any], checkpoint: CheckpointReader) -> dict[str, Any]:
    """Sort the entries as the state had them, if the planner data has their order.

    The order matters for dicts only: an item of a list has its index.
    """
    known = {fqn: leaves[fqn] for fqn in checkpoint.paths if fqn in leaves}
    return {**known, **leaves}
