"""Open safetensors files in Hugging Face's layout. A tensor is read only when it is used."""

import errno
import json
import stat
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from stepkeeper_planners.errors import SourceError, printable
from stepkeeper_planners.formats.mapped_files import map_file
from stepkeeper_planners.formats.reporting import join_names
from stepkeeper_planners.formats.safetensors.shard_files import DTYPES, INDEX_SUFFIX, SUFFIX

__all__ = ["open_safetensors"]

_BY_NAME: Final = {
    **{name: dtype for dtype, name in DTYPES.items()},
    "F4": torch.float4_e2m1fn_x2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
_LENGTH_BYTES: Final = 8
"""The size of the header's length, with which a file begins."""
_NO_FILE: Final = (errno.ENOENT, errno.ELOOP, errno.ENAMETOOLONG)


def open_safetensors(src: Path) -> dict[str, torch.Tensor]:
    """Map all tensors by name: those of one file, of all files of a folder, or of the files that an index names.

    Raises:
        FileNotFoundError: there is no `src`.
        SourceError: a file is damaged, cut off, missing or no regular file, or the index and the files disagree.
        OSError: a file can't be read.
    """
    index = _find_index(src)
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
    _check_regular(index)
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise SourceError(f"{index} is no index of safetensors files: it has no weight_map") from error
    if type(weight_map) is not dict or not weight_map:
        raise SourceError(f"{index}: the weight_map names no tensor")
    for name, file_name in weight_map.items():
        if type(file_name) is not str or not file_name.endswith(SUFFIX) or Path(file_name).name != file_name:
            raise SourceError(
                f"{index}: the weight_map has {printable(str(file_name))} for {printable(name)}, "
                "which is no file beside it"
            )
    return weight_map


def _check_regular(path: Path) -> None:
    """Refuse what isn't a file: to open a pipe would wait for its writer."""
    try:
        mode = path.stat().st_mode
    except ValueError as error:
        raise SourceError(f"{printable(str(path))} can't be the name of a file") from error
    except OSError as error:
        if error.errno in _NO_FILE:
            raise SourceError(f"{printable(str(path))} is missing") from error
        raise
    if not stat.S_ISREG(mode):
        raise SourceError(f"{printable(str(path))} is no regular file")


def _map_tensors(path: Path) -> dict[str, torch.Tensor]:
    _check_regular(path)
    try:
        # The library would map the file for torch with memory reserved for all of it.
        with safe_open(path, framework="np") as checked:
            names = checked.offset_keys()
        with path.open("rb") as file:
            start = _LENGTH_BYTES + int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header = json.loads(file.read(start - _LENGTH_BYTES).decode())
            whole = map_file(file)
        return {name: _view_tensor(header[name], memoryview(whole)[start:]) for name in names}
    except FileNotFoundError as error:
        raise SourceError(f"{printable(str(path))} is missing") from error
    except (SafetensorError, ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise SourceError(
            f"{printable(str(path))} is no safetensors file, damaged or cut off: {error}"
        ) from error


def _view_tensor(entry: dict[str, Any], data: memoryview) -> torch.Tensor:
    dtype, shape, (start, end) = _BY_NAME.get(entry["dtype"]), entry["shape"], entry["data_offsets"]
    if dtype is None:
        raise ValueError(f"torch has no dtype {entry['dtype']}")
    if entry["dtype"] == "F4":
        # An element of torch's holds two of the file's.
        shape = [*shape[:-1], shape[-1] // 2]
    if start == end:
        return torch.empty(0, dtype=dtype).reshape(shape)
    content = torch.frombuffer(data, dtype=torch.uint8, count=end - start, offset=start)
    if content.data_ptr() % dtype.itemsize:
        content = content.clone()
    return content.view(dtype).reshape(shape)
