"""Tell torchrun where it runs, by the variables that it reads in place of options, and hear why it failed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from stepkeeper.contract import ExitCode, Identity, Termination
from stepkeeper.launch.last_word import SIGTERM

__all__ = ["ERROR_FILE_VARIABLE", "read_torchrun_error", "torchrun_variables"]

ERROR_FILE_VARIABLE: Final = "TORCHELASTIC_ERROR_FILE"
"""Names the file into which torchrun writes the exception that ended it."""

_STORE_LOST: Final = "DistNetworkError: "
_STOPPED: Final = "SignalException: "
_NEVER_CAME: Final = "timed out"
"""In the message of that error where no connection was made. Whoever never came isn't lost."""


def torchrun_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what torchrun has to know of the job's hosts, except for what the environment says already.

    Args:
        environ: The environment of the container. Outside an operator's pod nothing follows from it.

    Raises:
        ContractError: The operator's variables aren't as the operator sets them.

    """
    if not Identity.present(environ):
        return {}
    identity = Identity.from_env(environ)
    variables = {
        "PET_NNODES": str(identity.n_hosts),
        "PET_NODE_RANK": str(identity.rank),
        "PET_MASTER_ADDR": identity.coordinator,
        "PET_MASTER_PORT": str(identity.coordinator_port),
    }
    return {name: value for name, value in variables.items() if name not in environ}


def read_torchrun_error(path: Path) -> Termination | None:
    """Read why torchrun failed before its processes trained, if it was for the loss of another host or a notice.

    The torchrun in rank 0's pod has the store by which they all find each other.

    Args:
        path: The file that ERROR_FILE_VARIABLE named.

    """
    try:
        said = json.loads(path.read_bytes())["message"]
    except (OSError, ValueError, KeyError, TypeError):
        # None was written: it hasn't failed by an exception, or it is no torchrun.
        return None
    text = said.get("message") if isinstance(said, dict) else said
    if not isinstance(text, str):
        return None
    if text.startswith(_STORE_LOST) and _NEVER_CAME not in text:
        return Termination(code=ExitCode.PEER_LOST, error=text)
    return Termination(code=ExitCode.SAVED, notice=SIGTERM) if text.startswith(_STOPPED) else None
