"""Run a launcher of training processes in a pod: python -m stepkeeper.launch torchrun --nproc-per-node=8 train.py.

torchrun is told the hosts of the job. When it ends, this process ends with the exit code that the training meant:
75 after a notice, where torchrun itself ends with 1.
"""

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from stepkeeper.contract import RUN_FOLDER, ContractError, ExitCode, Identity, Termination
from stepkeeper.launch.child import CommandEnd, CommandError, run
from stepkeeper.launch.last_word import SIGTERM, choose_exit_code, read_last_word, withdraw_last_word
from stepkeeper.launch.torchrun import ERROR_FILE_VARIABLE, read_torchrun_error, torchrun_variables
from stepkeeper.process_end.last_words import leave_last_word

_USAGE = "usage: python -m stepkeeper.launch COMMAND [ARGUMENT ...]"
_BAD_USAGE = 2
_GRACE_S = 30.0
"""Seconds that Kubernetes and Slurm leave by default."""


def main(command: list[str]) -> int:
    """Run the command and return the exit code to end with."""
    if command[:1] == ["--"]:
        del command[0]
    if not command:
        return _complain(_USAGE, _BAD_USAGE)
    try:
        if not Identity.present(os.environ):
            return run(command, os.environ, grace_s=_GRACE_S).code
        return _run_in_pod(command, Identity.from_env(os.environ))
    except CommandError as error:
        return _complain(str(error), error.code)
    except ContractError as error:
        return _complain(str(error), _BAD_USAGE)


def _run_in_pod(command: list[str], pod: Identity) -> int:
    last_word_file = Path(pod.termination_file)
    # It can be written to also where the root of the file system can't.
    shared = RUN_FOLDER if Path(RUN_FOLDER).is_dir() else None
    # A command that isn't waited for may still write there.
    with TemporaryDirectory(prefix="launch-", dir=shared, ignore_cleanup_errors=True) as folder:
        error_file = os.environ.get(ERROR_FILE_VARIABLE) or f"{folder}/error.json"
        told = torchrun_variables(os.environ) | {ERROR_FILE_VARIABLE: error_file}

        def has_stopped() -> bool:
            word = read_last_word(last_word_file)
            return word is not None and word.code != ExitCode.DONE

        end = run(command, os.environ | told, grace_s=pod.grace_s, may_leave=has_stopped)
        said = last_word = read_last_word(last_word_file)
        if said is None and end.code != ExitCode.DONE:
            last_word = read_torchrun_error(Path(error_file)) or _judge_early_stop(end)
    meant = choose_exit_code(end.code, last_word, was_told=end.was_told)
    if said is not None and said.code != meant:
        withdraw_last_word(last_word_file)
    elif said is None and last_word is not None and last_word.code == meant:
        leave_last_word(last_word_file, last_word)
    if meant != end.code:
        sys.stderr.write(
            f"stepkeeper.launch: {command[0]} ended with code {end.code}, the training with {meant}\n"
        )
    return meant


def _judge_early_stop(end: CommandEnd) -> Termination | None:
    """Return the last word for a command that died of being told to stop before it had started any process.

    So does torchrun while it is loaded, and while it waits for those of other pods.
    """
    return Termination(code=ExitCode.SAVED, notice=SIGTERM) if end.died_alone else None


def _complain(message: str, code: int) -> int:
    sys.stderr.write(f"stepkeeper.launch: {message}\n")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
