"""Write the tensors of a checkpoint to safetensors files."""

from pathlib import Path
from typing import BinaryIO, Final

from stepkeeper_planners.formats.checkpoint_reader import CheckpointReader
from stepkeeper_planners.formats.destination import new_file, new_folder
from stepkeeper_planners.formats.reporting import ProgressMeter
from stepkeeper_planners.formats.safetensors.shard_files import (
    INDEX_NAME,
    INDEX_SUFFIX,
    SUFFIX,
    ShardFile,
    build_index,
)

__all__ = ["write_shards"]

_METADATA: Final = {"format": "pt"}


def write_shards(
    target: Path,
    shards: tuple[ShardFile, ...],
    checkpoint: CheckpointReader,
    meter: ProgressMeter,
    *,
    overwrite: bool,
) -> tuple[Path, ...]:
    """Write the one file `target` if it is named like a safetensors file; else a folder, with an index.

    Return the files that were written. With `overwrite`, a file, or a folder that holds nothing but safetensors files,
    is replaced. Raises ValueError if `target` is a file and there are several shards; else as `new_file` and
    `new_folder`.
    """
    if target.suffix != SUFFIX:
        return _write_folder(target, shards, checkpoint, meter, overwrite=overwrite)
    if len(shards) > 1:
        raise ValueError(
            f"{target} names one file, but max_shard_bytes needs {len(shards)}; name a folder, or leave "
            "max_shard_bytes out"
        )
    with new_file(target, source=checkpoint.files.path, overwrite=overwrite) as file:
        _write_shard(file, shards[0], checkpoint, meter)
    return (target,)


def _write_folder(
    target: Path,
    shards: tuple[ShardFile, ...],
    checkpoint: CheckpointReader,
    meter: ProgressMeter,
    *,
    overwrite: bool,
) -> tuple[Path, ...]:
    with new_folder(
        target, source=checkpoint.files.path, overwrite=overwrite, replaceable=_is_of_safetensors
    ) as new:
        for shard in shards:
            with (new / shard.file_name).open("xb") as file:
                _write_shard(file, shard, checkpoint, meter)
        if len(shards) > 1:
            (new / INDEX_NAME).write_bytes(build_index(shards))
        return tuple(target / name for name in sorted(path.name for path in new.iterdir()))


def _write_shard(
    file: BinaryIO, shard: ShardFile, checkpoint: CheckpointReader, meter: ProgressMeter
) -> None:
    file.write(shard.header(_METADATA))
    for entry in shard.entries:
        for piece in checkpoint.read_elements(entry.source):
            file.write(piece)
            meter.add(len(piece))


def _is_of_safetensors(path: Path) -> bool:
    return path.name.endswith((SUFFIX, INDEX_SUFFIX))
