"""Run a launcher of training processes in a pod: python -m stepkeeper.launch torchrun --nproc-per-node=8 train.py.

torchrun gets the hosts of the job as variables. When it ends, this process exits with the training's own code, from its
termination message: 75 after a notice, where torchrun itself exits with 1.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from stepkeeper.contract import (
    RUN_FOLDER,
    SUPERVISOR_VARIABLE,
    ContractError,
    ExitCode,
    Identity,
    NoticeSource,
    Termination,
)
from stepkeeper.ending import message
from stepkeeper.launch.child import Child
from stepkeeper.launch.exit_code import choose_exit_code, read_torchrun_error

__all__ = ["main", "torchrun_variables"]

_USAGE: Final = "usage: python -m stepkeeper.launch COMMAND [ARGUMENT ...]"
_BAD_USAGE: Final = 2
_NO_PROGRAM: Final = 127
_NOT_STARTED: Final = 126
_DIED_OF_SIGTERM: Final = 143
_GRACE_S: Final = 30.0
"""The default grace period of Kubernetes and Slurm, in seconds."""

_ERROR_FILE_VARIABLE: Final = "TORCHELASTIC_ERROR_FILE"
"""The variable with the file into which torchrun writes the exception that ended it."""


def main(command: list[str]) -> int:
    """Run the command and return the exit code to end with."""
    if command[:1] == ["--"]:
        del command[0]
    if not command:
        return _complain(_USAGE, _BAD_USAGE)
    # The pod's folder, an emptyDir, is writable even if the root file system isn't.
    parent = RUN_FOLDER if os.access(RUN_FOLDER, os.W_OK) else None
    try:
        # A command that is no longer waited for may still write there during the cleanup.
        temporary = TemporaryDirectory(prefix="launch-", dir=parent, ignore_cleanup_errors=True)
    except OSError as error:
        return _complain(f"creating a folder for the command failed: {error}", _NOT_STARTED)
    with temporary as name:
        folder = Path(name)
        try:
            if Identity.present(os.environ):
                return _run_in_pod(command, Identity.from_env(os.environ), folder)
            return _start(command, os.environ, folder, _GRACE_S).wait(lambda: False)
        except ContractError as error:
            return _complain(str(error), _BAD_USAGE)


def torchrun_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that pass the job's hosts to torchrun, without those that are set already."""
    identity = Identity.from_env(environ)
    variables = {
        "PET_NNODES": str(identity.n_hosts),
        "PET_NODE_RANK": str(identity.rank),
        "PET_MASTER_ADDR": identity.coordinator,
        "PET_MASTER_PORT": str(identity.coordinator_port),
    }
    return {name: value for name, value in variables.items() if name not in environ}


def _run_in_pod(command: list[str], pod: Identity, folder: Path) -> int:
    message_file = Path(pod.termination_file)
    error_file = os.environ.get(_ERROR_FILE_VARIABLE) or f"{folder}/error.json"
    variables = torchrun_variables(os.environ) | {_ERROR_FILE_VARIABLE: error_file}

    def has_stopped() -> bool:
        found = message.read(message_file)
        return found is not None and found.code != ExitCode.DONE

    child = _start(command, os.environ | variables, folder, pod.grace_s)
    code = child.wait(has_stopped)
    written = evidence = message.read(message_file)
    if written is None and code != ExitCode.DONE:
        evidence = read_torchrun_error(Path(error_file)) or _judge_early_stop(code, child)
    meant = choose_exit_code(code, evidence, was_asked_to_stop=child.was_asked_to_stop)
    # The operator prefers the file to the exit code, so both must agree.
    if written is not None and written.code != meant:
        message.withdraw(message_file)
    elif written is None and evidence is not None and evidence.code == meant:
        message.write(message_file, evidence)
    if meant != code:
        sys.stderr.write(
            f"stepkeeper.launch: {command[0]} exited with code {code}, the training with {meant}\n"
        )
    return meant


def _start(command: list[str], environ: Mapping[str, str], folder: Path, grace_s: float) -> Child:
    try:
        # Only this process's parent is the supervisor.
        inherited = {name: value for name, value in environ.items() if name != SUPERVISOR_VARIABLE}
        supervisor = environ.get(SUPERVISOR_VARIABLE)
        return Child(command, inherited, folder, grace_s, None if supervisor is None else int(supervisor))
    except FileNotFoundError:
        sys.exit(_complain(f"program {command[0]!r} not found", _NO_PROGRAM))
    except OSError as error:
        sys.exit(_complain(f"starting {command[0]!r} failed: {error}", _NOT_STARTED))


def _judge_early_stop(code: int, child: Child) -> Termination | None:
    """Return the message for a command that SIGTERM killed without a rank that could have saved.

    SIGTERM kills torchrun while it is loading, and while it waits for the other pods.
    """
    died = child.was_asked_to_stop and code == _DIED_OF_SIGTERM
    return Termination(code=ExitCode.SAVED, notice=NoticeSource.SIGTERM) if died else None


def _complain(message: str, code: int) -> int:
    sys.stderr.write(f"stepkeeper.launch: {message}\n")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
