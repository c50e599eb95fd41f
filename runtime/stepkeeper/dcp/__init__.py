"""Provide storage for plain `dcp.save`, `dcp.async_save` and `dcp.load` of torch.distributed.checkpoint.

Each of the classes is loaded, and torch with it, when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from stepkeeper.dcp.reader import StorageReader
    from stepkeeper.dcp.stager import Stager
    from stepkeeper.dcp.writer import StorageWriter

__all__ = ["Stager", "StorageReader", "StorageWriter"]

_MODULES: Final = {
    "Stager": "stepkeeper.dcp.stager",
    "StorageReader": "stepkeeper.dcp.reader",
    "StorageWriter": "stepkeeper.dcp.writer",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'stepkeeper.dcp' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
