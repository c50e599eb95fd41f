"""Write `.metadata`: the pickle that lists a folder's contents for stock torch.distributed.checkpoint."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from typing import Final

from stepkeeper.checkpoint.dcp_format.pickle_writer import Call, Global, Instance, Pairs, encode_pickle
from stepkeeper.checkpoint.inventory import ChunkRecord, TensorRecord, ValueRecord
from stepkeeper.checkpoint.manifest import Manifest
from stepkeeper.errors import ManifestError
from stepkeeper_planners.flat_names import make_flat_names
from stepkeeper_planners.geometry.overlapping_pair import find_overlap

__all__ = ["METADATA_NAME", "KeyPath", "encode_metadata", "merge_tensors", "merge_values"]

METADATA_NAME: Final = ".metadata"

KeyPath = tuple[str | int, ...]
"""The place of a flattened name in the nested state: keys of dicts, indices of lists."""

_MODULE: Final = "torch.distributed.checkpoint.metadata"
_VERSION: Final = "1.0.0"
"""The version of DCP's format that torch 2.9 writes."""

_SIZE: Final = Global("torch", "Size")
_CHUNK: Final = Global(_MODULE, "ChunkStorageMetadata")
_TENSOR: Final = Global(_MODULE, "TensorStorageMetadata")
_BYTES: Final = Global(_MODULE, "BytesStorageMetadata")
_INDEX: Final = Global(_MODULE, "MetadataIndex")
_STORAGE_INFO: Final = Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_STRIDED: Final = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
_CONTIGUOUS: Final = Call(Global(_MODULE, "_MEM_FORMAT_ENCODING"), (0,))


def merge_tensors(manifests: Sequence[Manifest]) -> dict[str, TensorRecord]:
    """Merge the chunks of all ranks by tensor, sorted by name and place. Tied tensors are under all of their names.

    Raises ManifestError if ranks disagree, or chunks overlap or don't cover their tensor.
    """
    merged: dict[str, tuple[TensorRecord, list[ChunkRecord]]] = {}
    for manifest in manifests:
        for tensor in manifest.tensors:
            first, chunks = merged.setdefault(tensor.fqn, (tensor, []))
            if (first.dtype, first.global_shape) != (tensor.dtype, tensor.global_shape):
                raise ManifestError(
                    f"tensor {tensor.fqn!r} is {first.dtype}{list(first.global_shape)} on one rank, "
                    f"{tensor.dtype}{list(tensor.global_shape)} on rank {manifest.rank}"
                )
            chunks.extend(tensor.chunks)
    tensors = {
        fqn: first
        if len(chunks) == 1 == len(first.chunks)
        else TensorRecord(
            fqn=fqn,
            dtype=first.dtype,
            global_shape=first.global_shape,
            chunks=tuple(sorted(chunks, key=lambda chunk: chunk.offsets)),
        )
        for fqn, (first, chunks) in sorted(merged.items())
    }
    for tensor in tensors.values():
        _check_covered(tensor)
    aliases = dict(sorted((name, of) for manifest in manifests for name, of in manifest.aliases.items()))
    for name, of in aliases.items():
        if name in merged or of not in merged:
            raise ManifestError(
                f"tied tensor {name!r} refers to {of!r}: that wasn't saved, or {name!r} was saved too"
            )
        tensors[name] = tensors[of]._replace(fqn=name)
    return tensors


def merge_values(manifests: Sequence[Manifest]) -> dict[str, ValueRecord]:
    """Merge the values of all ranks by name. Raises ManifestError if two ranks wrote one."""
    values: dict[str, ValueRecord] = {}
    for manifest in manifests:
        for value in manifest.values:
            if value.fqn in values:
                raise ManifestError(
                    f"value {value.fqn!r} was written by rank {manifest.rank} and by another rank"
                )
            values[value.fqn] = value
    return dict(sorted(values.items()))


def encode_metadata(
    manifests: Sequence[Manifest], *, key_paths: Mapping[str, KeyPath] | None = None
) -> bytes:
    """Encode the `.metadata` of the checkpoint that all ranks' manifests describe together.

    `key_paths` has the keys that lead to each name, from which stock torch rebuilds a nested state.
    """
    tensors = merge_tensors(manifests)
    values = merge_values(manifests)
    # torchtitan looks for an optimizer's options under the names of its parameters.
    for name, of in make_flat_names(key_paths, {**tensors, **values}).items():
        if of in tensors:
            tensors[name] = tensors[of]._replace(fqn=name)
        else:
            values[name] = values[of]._replace(fqn=name)
    # Generated one by one: the pickle of all of them takes a tenth of the memory of the objects.
    state: Iterator[tuple[object, object]] = chain(
        ((fqn, _encode_tensor(tensor)) for fqn, tensor in tensors.items()),
        ((fqn, Instance(_BYTES)) for fqn in values),
    )
    storage: Iterator[tuple[object, object]] = chain(
        (pair for fqn, tensor in tensors.items() for pair in _encode_storage(fqn, tensor)),
        (
            (_encode_index(fqn), _encode_location(value.path, value.offset_bytes, value.length_bytes))
            for fqn, value in values.items()
        ),
    )
    fields: dict[str, object] = {
        "state_dict_metadata": Pairs(state),
        "planner_data": dict(key_paths) if key_paths is not None else None,
        "storage_data": Pairs(storage),
        "storage_meta": None,
        "version": _VERSION,
    }
    return encode_pickle(Instance(Global(_MODULE, "Metadata"), fields))


def _encode_tensor(tensor: TensorRecord) -> Instance:
    properties = (Global("torch", tensor.dtype), _STRIDED, False, _CONTIGUOUS, False)
    chunks = [
        Instance(_CHUNK, {"offsets": _encode_size(chunk.offsets), "sizes": _encode_size(chunk.sizes)})
        for chunk in tensor.chunks
    ]
    fields = {
        "properties": Instance(Global(_MODULE, "TensorProperties"), properties),
        "size": _encode_size(tensor.global_shape),
        "chunks": chunks,
    }
    return Instance(_TENSOR, fields)


def _encode_storage(fqn: str, tensor: TensorRecord) -> Iterator[tuple[object, object]]:
    for place, chunk in enumerate(tensor.chunks):
        key = _encode_index(fqn, _encode_size(chunk.offsets), place)
        yield key, _encode_location(chunk.path, chunk.offset_bytes, chunk.length_bytes)


def _encode_index(fqn: str, offset: Call | None = None, place: int | None = None) -> Instance:
    return Instance(_INDEX, {"fqn": fqn, "index": place, "offset": offset})


def _encode_location(path: str, offset_bytes: int, length_bytes: int) -> Instance:
    return Instance(_STORAGE_INFO, {"relative_path": path, "offset": offset_bytes, "length": length_bytes})


def _encode_size(numbers: tuple[int, ...]) -> Call:
    return Call(_SIZE, (numbers,))


def _check_covered(tensor: TensorRecord) -> None:
    """Check that every element is in exactly one chunk."""
    n_dims, chunks = len(tensor.global_shape), tensor.chunks
    # One chunk that is the whole tensor needs no further look.
    if len(chunks) == 1 and chunks[0].sizes == tensor.global_shape and chunks[0].offsets == (0,) * n_dims:
        return
    for chunk in chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == n_dims or not all(
            start >= 0 and size >= 0 and start + size <= whole
            for start, size, whole in zip(chunk.offsets, chunk.sizes, tensor.global_shape, strict=True)
        ):
            raise ManifestError(
                f"tensor {tensor.fqn!r} has the shape {tensor.global_shape}, but its chunk at {chunk.offsets} with "
                f"the sizes {chunk.sizes} is outside it: the ranks' plans don't fit together"
            )
    # Readers find a chunk by its offsets, even one without elements.
    places = {chunk.offsets for chunk in tensor.chunks}
    volume = sum(prod(chunk.sizes) for chunk in tensor.chunks)
    if volume != prod(tensor.global_shape) or len(places) != len(tensor.chunks):
        raise ManifestError(
            f"tensor {tensor.fqn!r} has {prod(tensor.global_shape)} elements, but its {len(tensor.chunks)} "
            f"chunks at {len(places)} offsets have {volume}: the ranks' plans don't fit together"
        )
    overlap = find_overlap(tensor.chunks)
    if overlap is not None:
        one, other = ((chunk.offsets, chunk.sizes) for chunk in map(tensor.chunks.__getitem__, overlap))
        raise ManifestError(
            f"tensor {tensor.fqn!r}: its chunks {one} and {other} (offsets and sizes) overlap, others leave a gap: "
            "the ranks' plans don't fit together"
        )
