"""Find out from the environment which launcher started this process, and so how it joins the others. Pure."""

from collections.abc import Mapping
from enum import Enum
from typing import Final

from stepkeeper.contract import Identity
from stepkeeper.errors import ProcessGroupError

__all__ = ["Launcher", "choose_launcher", "is_launched", "read_local_rank"]

_WHO: Final = ("RANK", "WORLD_SIZE")
"""The variables that only a launcher of several processes sets: a template may set its own MASTER_ADDR."""

_NEEDED: Final = (*_WHO, "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""The variables that torchrun, and launchers like it, set in each process."""


class Launcher(Enum):
    """The program that started the processes."""

    TPU = "tpu"
    """One process on each TPU host, or torch_xla's spawn: the TPU runtime knows them all."""

    TORCHRUN = "torchrun"
    """torchrun, `python -m torch.distributed.run`, or another launcher that sets the same variables."""

    OPERATOR = "operator"
    """The operator alone: one process in each pod."""

    NONE = "none"
    """No launcher: this process is the only one."""


def choose_launcher(environ: Mapping[str, str], *, on_tpu: bool) -> Launcher:
    """Return the launcher that started this process. Raises ProcessGroupError if variables are missing."""
    if on_tpu:
        return Launcher.TPU
    if is_launched(environ):
        missing = [name for name in _NEEDED if not environ.get(name)]
        if missing:
            raise ProcessGroupError(
                f"{_listed([name for name in _NEEDED if name in environ])} set as by a launcher like torchrun, but "
                f"{_listed(missing)} not. Set all of {', '.join(_NEEDED)}, or none of them"
            )
        return Launcher.TORCHRUN
    return Launcher.OPERATOR if Identity.present(environ) else Launcher.NONE


def is_launched(environ: Mapping[str, str]) -> bool:
    """Return whether a launcher like torchrun started this process, as one of several."""
    return any(name in environ for name in _WHO)


def read_local_rank(environ: Mapping[str, str]) -> int:
    """Return this process's number on its host, from torchrun or torch_xla's spawn; else 0."""
    return int(environ.get("LOCAL_RANK") or environ.get("PJRT_LOCAL_PROCESS_RANK") or 0)


def _listed(names: list[str]) -> str:
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"
