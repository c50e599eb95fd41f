"""Open safetensors files in Hugging Face's layout. A tensor is read only when it is used."""

import json
import mmap
from math import prod
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open

from stepkeeper_planners.errors import SourceError, printable
from stepkeeper_planners.formats.mapped_files import map_file
from stepkeeper_planners.formats.reporting import join_names
from stepkeeper_planners.formats.safetensors.shard_files import DTYPES, INDEX_SUFFIX, SUFFIX

__all__ = ["open_safetensors"]

_LENGTH_BYTES: Final = 8
"""A file begins with the length of its header."""

_BY_NAME: Final = {name: dtype for dtype, name in DTYPES.items()}


def open_safetensors(src: Path) -> dict[str, torch.Tensor]:
    """Map all tensors by name: those of one file, of all files of a folder, or of the files that an index names.

    Raises FileNotFoundError without `src`; SourceError if a file is damaged, cut off or missing, or the index
    is wrong.
    """
    index = _find_index(src)
    # By the name of each tensor, the name of its file: as the index has it, and as it was found.
    weight_map = None if index is None else _read_weight_map(index)
    tensors: dict[str, torch.Tensor] = {}
    found: dict[str, str] = {}
    for path in _list_files(src, index, weight_map):
        for name, tensor in _map_tensors(path).items():
            if name in tensors:
                raise SourceError(f"{printable(name)} is in {path}, and in {found[name]} beside it")
            tensors[name], found[name] = tensor, path.name
    if weight_map is not None and weight_map != found:
        differing = sorted(dict(weight_map.items() ^ found.items()))
        raise SourceError(
            f"{index} and the files that it names differ in {join_names(differing)}; if the files are right, convert "
            "them without the index"
        )
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


def _list_files(src: Path, index: Path | None, weight_map: dict[str, str] | None) -> list[Path]:
    if index is not None and weight_map is not None:
        return [index.parent / file_name for file_name in sorted(set(weight_map.values()))]
    if not src.is_dir():
        return [src]
    files = sorted(src.glob(f"*{SUFFIX}"))
    if not files:
        raise SourceError(f"{src} has no {SUFFIX} file")
    return files


def _read_weight_map(index: Path) -> dict[str, str]:
    _check_is_file(index)
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise SourceError(f"{index} isn't an index of safetensors files: it has no weight_map") from error
    if type(weight_map) is not dict or not weight_map:
        raise SourceError(f"{index}: the weight_map names no tensor")
    for name, file_name in weight_map.items():
        if type(file_name) is not str or not file_name.endswith(SUFFIX) or Path(file_name).name != file_name:
            raise SourceError(
                f"{index}: the weight_map has {printable(str(file_name))} for {printable(name)}, "
                "which isn't a file beside it"
            )
    return weight_map


def _map_tensors(path: Path) -> dict[str, torch.Tensor]:
    _check_is_file(path)
    try:
        # It maps the file for reading only, however large it is, and checks the whole header.
        with safe_open(path, framework="np"):
            pass
        with path.open("rb") as file:
            start = _LENGTH_BYTES + int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header = json.loads(file.read(start - _LENGTH_BYTES))
            content = map_file(file)
        header.pop("__metadata__", None)
        return {name: _view(content, start, **described) for name, described in header.items()}
    except (SafetensorError, ValueError, LookupError, TypeError, OverflowError, RuntimeError) as error:
        raise SourceError(
            f"{printable(str(path))} isn't a safetensors file, or is damaged or cut off: {error}"
        ) from error


def _view(
    content: mmap.mmap, start: int, *, dtype: str, shape: list[int], data_offsets: list[int]
) -> torch.Tensor:
    known = _BY_NAME.get(dtype)
    if known is None:
        raise ValueError(f"torch has no tensors of dtype {dtype} that can be read")
    first, end = data_offsets
    if first == end:
        return torch.empty(shape, dtype=known)
    return torch.frombuffer(content, dtype=known, count=prod(shape), offset=start + first).view(shape)


def _check_is_file(path: Path) -> None:
    if not path.exists():
        raise SourceError(f"{printable(str(path))} is missing")
    if not path.is_file():
        raise SourceError(f"{printable(str(path))} isn't a regular file: it is a folder, a pipe or a device")
