"""Open a torch.save file. Nothing in it is run, and a tensor is read only when it is used."""

import pickle
from pathlib import Path
from typing import Any, BinaryIO, Final, final

import torch
from typing_extensions import override

from stepkeeper_planners.errors import PickleRefusedError, SourceError, UnknownNameError
from stepkeeper_planners.formats.mapped_files import map_file
from stepkeeper_planners.pickles.torch_archive import ZIP_MAGIC, TorchArchive
from stepkeeper_planners.pickles.torch_files import load_archive

__all__ = ["open_torch_save"]

_LEGACY_MAGIC: Final = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)
"""The first bytes of files of torch before 1.6."""
_ALIGNMENT_BYTES: Final = 16
"""The size of the widest elements."""


def open_torch_save(path: Path) -> dict[Any, Any]:
    """Map the state in the file. Its tensors are views of the file, read when they are used.

    Sizes and offsets in the file are checked against its content before anything relies on them. Raises
    FileNotFoundError; SourceError if it isn't a torch.save file, is damaged, or holds more than dense tensors
    and plain values.
    """
    with path.open("rb") as file:
        _check_kind(path, file.read(len(_LEGACY_MAGIC)))
        try:
            archive = _MappedArchive(path, file)
            _check_records(path, archive)
            state = load_archive(archive)
        except UnknownNameError as error:
            raise SourceError(
                f"{path} holds something other than dense tensors and plain values ({error}). Nothing was run. Save "
                "the file again with only dense tensors, numbers, strings, numpy arrays, and lists and dicts of these"
            ) from error
        except PickleRefusedError as error:
            raise SourceError(
                f"{path} is damaged or cut off, or torch.save didn't write it: {error}"
            ) from error
    if not isinstance(state, dict):
        raise SourceError(
            f"{path} holds a {type(state).__name__}, but a checkpoint needs a dict of names; "
            'save {"name": value} instead'
        )
    return state


@final
class _MappedArchive(TorchArchive):
    """Map each storage as a part of the file, without reading it."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        super().__init__(file, path.stat().st_size)
        self._whole = map_file(file)

    @override
    def content(self, name: str) -> torch.Tensor:
        start, n_bytes = self.locate_record(name)
        if not n_bytes:
            return torch.empty(0, dtype=torch.uint8)
        content = torch.frombuffer(self._whole, dtype=torch.uint8, count=n_bytes, offset=start)
        # torch.save aligns storages for any dtype; another program may not.
        return content if content.data_ptr() % _ALIGNMENT_BYTES == 0 else content.clone()


def _check_kind(path: Path, start: bytes) -> None:
    if start == _LEGACY_MAGIC:
        raise SourceError(
            f"{path} is in the format of torch before 1.6, which can only be read whole. With enough memory, run "
            "torch.save(torch.load(old, weights_only=True), new), then convert the new file"
        )
    if not start.startswith(ZIP_MAGIC):
        raise SourceError(f"{path} isn't a torch.save file: it doesn't start like one")


def _check_records(path: Path, archive: TorchArchive) -> None:
    if any(name.endswith("/constants.pkl") for name in archive.names):
        raise SourceError(
            f"{path} is a TorchScript program; save the state_dict() of the module that it was made from"
        )
