"""Open safetensors files in Hugging Face's layout. A tensor is read only when it is used."""

import mmap
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Final

import torch

from stepkeeper_planners.errors import SourceError, printable
from stepkeeper_planners.formats.checkpoint_files import LocalFolder, map_file, open_source_file
from stepkeeper_planners.formats.reporting import join_names
from stepkeeper_planners.formats.safetensors.header import (
    MAX_HEADER_BYTES,
    DuplicateKeys,
    HeaderEntry,
    parse_header,
    parse_json,
)
from stepkeeper_planners.formats.safetensors.shard_files import INDEX_SUFFIX, SUFFIX

__all__ = ["open_safetensors"]

_LENGTH_BYTES: Final = 8
_MOST_INDEX_BYTES: Final = MAX_HEADER_BYTES


def open_safetensors(src: Path) -> dict[str, torch.Tensor]:
    """Map all tensors by name: those of one file, of all files of a folder, or of the files that an index names.

    Raises:
        FileNotFoundError: there is no `src`.
        SourceError: a file is damaged, cut off or missing, or the index and the files disagree.
    """
    index = _find_index(src)
    weight_map = None if index is None else _read_weight_map(index)
    tensors: dict[str, torch.Tensor] = {}
    found: dict[str, str] = {}
    for path, what in _list_files(src, index, weight_map):
        for name, tensor in _map_tensors(path, what).items():
            if name in tensors:
                raise SourceError(f"{printable(name)} is in {path}, and in {found[name]} beside it")
            tensors[name], found[name] = tensor, path.name
    if index is not None and weight_map is not None:
        _check_index(index, weight_map, found)
    return tensors


def _find_index(src: Path) -> Path | None:
    if not src.is_dir():
        if not src.exists():
            raise FileNotFoundError(f"there is no {src}")
        return src if src.name.endswith(".json") else None
    indices = sorted(src.glob(f"*{INDEX_SUFFIX}"))
    if len(indices) > 1:
        raise SourceError(f"{src} has several indices ({join_names([p.name for p in indices])}); name one")
    return indices[0] if indices else None


def _list_files(
    src: Path, index: Path | None, weight_map: Mapping[str, str] | None
) -> list[tuple[Path, str]]:
    """Return each file, with a name of what should be in it, for errors."""
    if index is not None and weight_map is not None:
        firsts: dict[str, str] = {}
        for name, file_name in weight_map.items():
            firsts.setdefault(file_name, name)
        return [(index.parent / file_name, printable(firsts[file_name])) for file_name in sorted(firsts)]
    if not src.is_dir():
        return [(src, "the tensors")]
    files = sorted(src.glob(f"*{SUFFIX}"))
    if not files:
        raise SourceError(f"{src} has no {SUFFIX} file")
    return [(path, "the tensors") for path in files]


def _read_weight_map(index: Path) -> dict[str, str]:
    with open_source_file(LocalFolder(index.parent), index.name, "the index") as file:
        text = file.read(_MOST_INDEX_BYTES)
    try:
        document = parse_json(text)
        weight_map = document["weight_map"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise SourceError(f"{index} is no index of safetensors files: it has no weight_map") from error
    for found in (document, weight_map):
        if type(found) is DuplicateKeys:
            raise SourceError(f"{index}: {printable(found.name)} stands there twice")
    if type(weight_map) is not dict or not weight_map:
        raise SourceError(f"{index}: the weight_map names no tensor")
    for name, file_name in weight_map.items():
        if type(file_name) is not str or not file_name.endswith(SUFFIX) or Path(file_name).name != file_name:
            raise SourceError(
                f"{index}: the weight_map has {printable(str(file_name))} for {printable(name)}, "
                "which is no file beside it"
            )
    return weight_map


def _check_index(index: Path, weight_map: Mapping[str, str], found: Mapping[str, str]) -> None:
    """Check that the index and the files name the same tensors, each in the same file."""
    advice = "if the files are right, convert them without the index"
    if weight_map.keys() != found.keys():
        differing = sorted(weight_map.keys() ^ found.keys())
        raise SourceError(f"{index} and the files that it names differ in {join_names(differing)}; {advice}")
    for name, file_name in weight_map.items():
        if found[name] != file_name:
            raise SourceError(
                f"{index} says that {printable(name)} is in {printable(file_name)}, but it is in "
                f"{found[name]}; {advice}"
            )


def _map_tensors(path: Path, what: str) -> dict[str, torch.Tensor]:
    damaged = f"{path} is no safetensors file, damaged or cut off"
    with open_source_file(LocalFolder(path.parent), path.name, what, missing="is missing") as file:
        size_bytes = file.seek(0, 2)
        file.seek(0)
        header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        data_bytes = size_bytes - _LENGTH_BYTES - header_bytes
        if size_bytes < _LENGTH_BYTES or data_bytes < 0:
            raise SourceError(
                f"{damaged}: its header should have {header_bytes} bytes, the file has {size_bytes}"
            )
        if header_bytes > MAX_HEADER_BYTES:
            raise SourceError(f"{damaged}: its header has {header_bytes} bytes, more than {MAX_HEADER_BYTES}")
        entries = parse_header(file.read(header_bytes), data_bytes, where=str(path))
        content = map_file(file, size_bytes)
    return {stored.name: _view(content, size_bytes - data_bytes + stored.start, stored) for stored in entries}


def _view(content: mmap.mmap, start: int, stored: HeaderEntry) -> torch.Tensor:
    if stored.start == stored.end:
        return torch.empty(stored.shape, dtype=stored.dtype)
    n_items = prod(stored.shape)
    return torch.frombuffer(content, dtype=stored.dtype, count=n_items, offset=start).view(stored.shape)
