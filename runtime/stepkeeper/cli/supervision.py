"""Define the commands run and rehearse, which start a training."""

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from stepkeeper.contract import (
    AutoInterval,
    EveryInterval,
    HangLimits,
    Identity,
    Interval,
    RestartLimits,
    Retention,
    Settings,
)
from stepkeeper.errors import RefusedError, StorageError
from stepkeeper.storage import open_store, root_uri
from stepkeeper.supervise.attempt import build_command
from stepkeeper.supervise.rehearsal import RehearsalOptions
from stepkeeper.supervise.rehearsal import rehearse as rehearse_training
from stepkeeper.supervise.supervisor import RunOptions, Supervisor
from stepkeeper.supervise.terminal import RunTerminal

__all__ = ["rehearse", "run"]

_LIMITS = RestartLimits()

Words = Annotated[
    list[str],
    typer.Argument(
        metavar="SCRIPT", help="The script, or another command, and its arguments. Options stand before it."
    ),
]
NProcs = Annotated[int, typer.Option("--nproc", min=1, help="Number of processes, which torchrun starts.")]
SaveEvery = Annotated[
    int | None,
    typer.Option(
        "--save",
        metavar="STEPS",
        min=1,
        help="Steps between saves. Default: by the cost of a save, in seconds.",
    ),
]
GraceS = Annotated[
    int,
    typer.Option("--grace", metavar="SECONDS", min=2, help="Time to save and stop in, after a signal."),
]


def run(
    words: Words,
    *,
    root: Annotated[str, typer.Option("--root", metavar="URL", help="Where the checkpoints go.")],
    n_procs: NProcs = 1,
    save: SaveEvery = None,
    keep: Annotated[int, typer.Option("--keep", min=1, help="Number of newest checkpoints to keep.")] = 3,
    max_failures: Annotated[
        int, typer.Option("--max-failures", min=0, help="Restarts after errors without a new checkpoint.")
    ] = _LIMITS.max_failures,
    grace_s: GraceS = 30,
) -> None:
    """Run a training, and restart it by the operator's rules until it is done.

    The script opens its manager by CheckpointManager.from_env(). Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 save and stop; a
    second Ctrl-C ends at once. Exit codes: 0 done; 75 saved and stopped, and the same command continues; 130 ended by a
    second Ctrl-C; else the training's own.
    """
    options = RunOptions(
        command=_build_command(words, n_procs),
        settings=Settings(
            uri=_check_root(root),
            interval=_build_interval(save),
            retention=Retention(last=keep),
            hang=HangLimits(),
        ),
        grace_s=grace_s,
        limits=RestartLimits(max_failures=max_failures),
    )
    raise typer.Exit(Supervisor(options, RunTerminal()).run())


def rehearse(
    words: Words,
    *,
    n_preemptions: Annotated[int, typer.Option("--preemptions", min=1, help="Number of preemptions.")] = 3,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, help="Repeat the rehearsal that printed this seed.")
    ] = None,
    save: Annotated[int, typer.Option("--save", metavar="STEPS", min=1, help="Steps between saves.")] = 10,
    n_procs: NProcs = 1,
    grace_s: GraceS = 30,
) -> None:
    """Check that a training resumes exactly: run it undisturbed and preempted, and compare the two.

    The preemptions come at random steps: half of them are notices, the others kill a process. The final states are
    compared bit for bit, and the metrics of all steps. Exit code 0 if all is equal, else 1.
    """
    options = RehearsalOptions(
        command=_build_command(words, n_procs),
        interval=_build_interval(save),
        n_preemptions=n_preemptions,
        seed=seed,
        grace_s=grace_s,
    )
    raise typer.Exit(rehearse_training(options, RunTerminal()))


def _check_root(root: str) -> str:
    """Return the root's URI. Raises BadUriError if no start could open it. The training waits for storage itself."""
    uri = root_uri(root)
    with suppress(StorageError):
        open_store(uri)
    return uri


def _build_interval(save: int | None) -> Interval:
    return Interval(auto=AutoInterval()) if save is None else Interval(every=EveryInterval(steps=save))


def _build_command(words: list[str], n_procs: int) -> list[str]:
    if Identity.present(os.environ):
        raise RefusedError(
            "the operator or another run supervises this process already: start the script itself"
        )
    is_script = words[0].endswith(".py")
    if is_script and not Path(words[0]).is_file():
        raise typer.BadParameter(f"there is no file {words[0]}")
    if not is_script and shutil.which(words[0]) is None:
        raise typer.BadParameter(f"there is no program {words[0]}, or it may not be executed")
    try:
        return build_command(words, n_procs)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
