"""Opening a torch.save file: nothing in it is run, and no tensor is read before it is used."""

import pickle
import re
import zipfile
from pathlib import Path
from typing import Any, Final, Self

import torch
from typing_extensions import override

from stepkeeper_planners.errors import SourceError
from stepkeeper_planners.numpy_data import numpy_globals

__all__ = ["open_torch_save"]

_ZIP_MAGIC: Final = b"PK\x03\x04"
_LEGACY_MAGIC: Final = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)
"""What files of torch before 1.6 begin with."""
_DAMAGE: Final = (RuntimeError, EOFError, ValueError, TypeError, LookupError, AttributeError)


def open_torch_save(path: Path) -> dict[Any, Any]:
    """The state in the file. Its tensors are views of the file, read where they are used.

    Raises:
        FileNotFoundError: there is no such file.
        SourceError: it is no torch.save file, a damaged one, or holds more than tensors and plain values.
    """
    _check_kind(path)
    try:
        with torch.serialization.safe_globals(numpy_globals()):
            state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise SourceError(_refusal(path, error)) from error
    except _DAMAGE as error:
        raise SourceError(f"{path} is damaged or cut off: {_first_line(error)}") from error
    if not isinstance(state, dict):
        raise SourceError(
            f"{path} holds a {type(state).__name__}, a checkpoint is made of a dict of names; "
            'save {"name": value} instead'
        )
    return state


def _check_kind(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(len(_LEGACY_MAGIC))
    if start == _LEGACY_MAGIC:
        raise SourceError(
            f"{path} is in the format of torch before 1.6, which can only be read whole. Where memory is enough: "
            "torch.save(torch.load(old, weights_only=True), new), then convert the new file"
        )
    if not start.startswith(_ZIP_MAGIC):
        raise SourceError(f"{path} is no torch.save file: it doesn't begin as one")
    try:
        with zipfile.ZipFile(path) as archive:
            names = {name.partition("/")[2] for name in archive.namelist()}
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise SourceError(f"{path} is damaged or cut off: {_first_line(error)}") from error
    if "constants.pkl" in names:
        raise SourceError(
            f"{path} is a TorchScript program; save the state_dict() of the module it was made of"
        )
    if "data.pkl" not in names:
        raise SourceError(f"{path} is a zip file, but none that torch.save wrote: it has no data.pkl")


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _refusal(path: Path, error: pickle.UnpicklingError) -> str:
    named = re.search(r"GLOBAL (\S+)", str(error))
    if named is None:
        return f"{path} is damaged, or holds what only running code can read: {_first_line(error)}"
    try:
        with zipfile.ZipFile(path) as archive:
            (record,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            with archive.open(record) as file:
                found = dict(_strangers(_Outline(file).load(), ""))
    except (zipfile.BadZipFile, pickle.UnpicklingError, *_DAMAGE):
        # The outline only makes the message better.
        found = {}
    where = "".join(f"; at {key}: {name}" for key, name in list(found.items())[:8])
    return (
        f"{path} holds objects that only running code of theirs can read ({named[1]}{where}). Nothing was run. "
        "Save the file again without them, as tensors, numbers, strings, numpy arrays, and lists and dicts of these"
    )


class _Stranger:
    """Stands for an object of any class: takes everything that unpickling does to one, and does nothing."""

    name = ""

    def __new__(cls, *_: object, **__: object) -> Self:
        return super().__new__(cls)

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __call__(self, *_: object, **__: object) -> "_Stranger":
        return self

    def __setstate__(self, _: object) -> None:
        pass

    def __setitem__(self, _: object, __: object) -> None:
        pass

    def append(self, _: object) -> None:
        pass

    def extend(self, _: object) -> None:
        pass

    def add(self, _: object) -> None:
        pass


class _Outline(pickle.Unpickler):
    """Makes the dicts and lists of a pickle, and strangers of everything that has a class."""

    @override
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) == ("collections", "OrderedDict"):
            return dict
        known = module_name.partition(".")[0] in {"torch", "numpy", "_codecs"} or module_name == "collections"
        return type("Known" if known else "Stranger", (_Stranger,), {"name": f"{module_name}.{global_name}"})

    @override
    def persistent_load(self, pid: Any, /) -> Any:
        return None


def _strangers(node: object, key: str) -> list[tuple[str, str]]:
    if isinstance(node, dict):
        return [
            found
            for name, value in node.items()
            for found in _strangers(value, f"{key}.{name}" if key else str(name))
        ]
    if isinstance(node, list | tuple):
        return [found for index, value in enumerate(node) for found in _strangers(value, f"{key}.{index}")]
    if isinstance(node, _Stranger) and type(node).__name__ == "Stranger":
        return [(key, node.name)]
    if isinstance(node, type) and issubclass(node, _Stranger):
        return [(key, node.name)] if node.__name__ == "Stranger" else []
    return []
