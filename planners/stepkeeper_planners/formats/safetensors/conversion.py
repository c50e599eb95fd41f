"""Convert safetensors files in Hugging Face's layout to checkpoints, and checkpoints to such files."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

from stepkeeper_planners.errors import DuplicateNameError, SourceError, UnsupportedValueError
from stepkeeper_planners.formats.checkpoint_files import CheckpointFiles, as_checkpoint_files
from stepkeeper_planners.formats.checkpoint_reader import CheckpointReader, open_checkpoint
from stepkeeper_planners.formats.checkpoint_writer import write_checkpoint
from stepkeeper_planners.formats.reporting import Conversion, Progress, ProgressMeter, join_names
from stepkeeper_planners.formats.safetensors.shard_files import make_entry, plan_shard_files
from stepkeeper_planners.formats.safetensors.shard_writer import write_shards
from stepkeeper_planners.formats.safetensors.source import open_safetensors

__all__ = ["RenameFunction", "checkpoint_to_safetensors", "safetensors_to_checkpoint"]

RenameFunction = Callable[[str], str | None]
"""Returns a tensor's name in the result for its name in the source; None leaves the tensor out."""


def safetensors_to_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    prefix: str = "",
    rename: RenameFunction | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Convert safetensors files to the checkpoint folder `dst`.

    The files are mapped; memory for about one tensor is needed.

    Args:
        src: a file, a folder of files, or an index of files ("model.safetensors.index.json").
        dst: the checkpoint folder to write.
        prefix: put this before each name: with "model", the tensor "a.weight" gets the name that
            {"model": model.state_dict()} has for it, "model.a.weight".
        rename: changes each name, before the prefix is added; None from it leaves the tensor out.
        overwrite: replace an existing checkpoint at `dst`.
        progress: called with the bytes of tensors that are done, and those of all tensors.

    Returns:
        The files that were written, and the tensors by their names in `src`.

    Raises:
        FileNotFoundError: there is no `src`.
        SourceError: a file is damaged, cut off or missing, or the index names a missing file or tensor.
        DuplicateNameError: two tensors get the same name.
        DestinationExistsError: there is something at `dst`.

    Ranks: one process, outside of a process group of several.
    """
    tensors = open_safetensors(Path(src))
    names = _rename_all(tensors, rename)
    state: dict[str, Any] = {name: tensors[source] for source, name in names.items()}
    conversion = write_checkpoint(
        {prefix: state} if prefix else state,
        Path(dst),
        source=Path(src),
        overwrite=overwrite,
        progress=progress,
    )
    return Conversion(
        files=conversion.files,
        tensors=tuple(names),
        left_out=tuple(source for source in tensors if source not in names),
        tensor_bytes=conversion.tensor_bytes,
    )


def checkpoint_to_safetensors(
    src: str | os.PathLike[str] | CheckpointFiles,
    dst: str | os.PathLike[str],
    *,
    prefix: str = "",
    rename: RenameFunction | None = None,
    values: Literal["refuse", "leave_out"] = "refuse",
    max_shard_bytes: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Convert the tensors of a checkpoint to safetensors files.

    Memory for a few small buffers is needed. A tied tensor is written under each of its names.

    Args:
        src: the checkpoint folder, or an object that reads its files.
        dst: one file if it ends in ".safetensors", else a folder.
        prefix: convert only the names below this one, and remove it: with "model", "model.a" becomes "a".
        rename: changes each name, after the prefix is removed; None from it leaves the tensor out.
        values: what to do with values that aren't tensors, which the format can't hold: raise, or leave them out.
        max_shard_bytes: the size of a file's tensors, at most; one larger tensor gets a file of its own. A folder of
            several files also gets an index.
        overwrite: replace existing safetensors files at `dst`.
        progress: called with the bytes of tensors that are done, and those of all tensors.

    Returns:
        The files that were written, and the tensors and other entries, by their names in `src`.

    Raises:
        SourceError: `src` isn't a checkpoint, one of its files is missing or damaged, or it has no such tensors.
        MetadataDecodeError: its metadata is damaged, contradicts itself, or would run code.
        UnsupportedValueError: there are values that aren't tensors, or a tensor has a dtype or name that the format
            lacks.
        DuplicateNameError: two tensors get the same name.
        DestinationExistsError: there is something at `dst`.

    Ranks: one process.
    """
    checkpoint, target = open_checkpoint(as_checkpoint_files(src)), Path(dst)
    names = _select_names(checkpoint, prefix, rename, values)
    entries = [
        make_entry(fqn, name, checkpoint.tensors[fqn].dtype, checkpoint.tensors[fqn].shape)
        for fqn, name in sorted(names.items(), key=lambda pair: checkpoint.tensors[pair[0]].first_location)
    ]
    total_bytes = sum(entry.n_bytes for entry in entries)
    meter = ProgressMeter(total_bytes=total_bytes, callback=progress)
    shards = plan_shard_files(entries, max_shard_bytes)
    files = write_shards(target, shards, checkpoint, meter, overwrite=overwrite)
    rest = [fqn for fqn in (*checkpoint.tensors, *checkpoint.values) if fqn not in names]
    return Conversion(files=files, tensors=tuple(names), left_out=tuple(rest), tensor_bytes=total_bytes)


def _select_names(
    checkpoint: CheckpointReader,
    prefix: str,
    rename: RenameFunction | None,
    values: Literal["refuse", "leave_out"],
) -> dict[str, str]:
    """Return the new name of each tensor that is converted. Raises as `checkpoint_to_safetensors`."""
    names = _rename_all(checkpoint.tensors, lambda fqn: _select_name(fqn, prefix, rename))
    if not names:
        raise SourceError(
            f"{checkpoint.files.name} has no tensor below {prefix!r}; it has {join_names(list(checkpoint.tensors))}"
        )
    refused = [fqn for fqn in checkpoint.values if not prefix or fqn.startswith(f"{prefix}.")]
    if values == "refuse" and refused:
        raise UnsupportedValueError(
            f"safetensors files hold tensors only, but {len(refused)} values of {checkpoint.files.name} aren't "
            f'tensors: {join_names(refused)}. Pass values="leave_out" to convert the rest'
        )
    return names


def _select_name(fqn: str, prefix: str, rename: RenameFunction | None) -> str | None:
    below = f"{prefix}." if prefix else ""
    if not fqn.startswith(below):
        return None
    name = fqn[len(below) :]
    return rename(name) if rename is not None else name


def _rename_all(names: Iterable[str], rename: RenameFunction | None) -> dict[str, str]:
    """Return the new name of each source name that is not left out."""
    renamed: dict[str, str] = {}
    sources: dict[str, str] = {}
    for source in names:
        name = source if rename is None else rename(source)
        if name is None:
            continue
        if name in sources:
            raise DuplicateNameError(
                f"{sources[name]!r} and {source!r} both become {name!r}; rename one of them differently"
            )
        renamed[source] = name
        sources[name] = source
    return renamed
