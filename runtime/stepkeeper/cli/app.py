"""Assemble the commands, and turn an error into one line on stderr and an exit code."""

from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer

from stepkeeper.cli.doctor.command import doctor
from stepkeeper.cli.formats import export, import_
from stepkeeper.cli.read import ls, path, show
from stepkeeper.cli.repair import repair
from stepkeeper.cli.supervision import rehearse, run
from stepkeeper.cli.terminal import command_exit_code, print_message
from stepkeeper.cli.verify import verify
from stepkeeper.cli.write import gc, rm
from stepkeeper.errors import StepkeeperError
from stepkeeper.storage.retry import Patience
from stepkeeper.version import __version__

__all__ = ["app"]


def _report_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap `command` so that a stepkeeper error becomes one line on stderr and an exit code."""

    @wraps(command)
    def guarded(*args: Any, **options: Any) -> None:
        try:
            command(*args, **options)
        except StepkeeperError as error:
            print_message(str(error))
            raise typer.Exit(command_exit_code(error)) from error

    return guarded


app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help=(
        "Work with the checkpoints of a root: a folder (file:///…), a bucket (gs://…), or a URI that fsspec knows. "
        "All commands but rm and repair are safe while a job is saving. Exit codes: 0 success, 1 something is wrong "
        "or missing, 2 usage, 3 the store doesn't answer or refuses, 4 not safe now, nothing was done."
    ),
)


def _print_version(*, wanted: bool) -> None:
    if wanted:
        typer.echo(f"stepkeeper {__version__}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    *,
    patience_s: Annotated[
        float,
        typer.Option(
            "--patience", min=0.0, metavar="SECONDS", help="How long to retry while the store doesn't answer."
        ),
    ] = 20.0,
    version: Annotated[  # noqa: ARG001  # its callback does it
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit."),
    ] = False,
) -> None:
    context.obj = Patience(total_s=patience_s)


for command in (ls, show, verify, path, rm, gc, doctor, repair, export):
    app.command()(_report_errors(command))
app.command("import")(_report_errors(import_))
# What follows the script belongs to the script.
for start in (run, rehearse):
    app.command(context_settings={"allow_interspersed_args": False})(_report_errors(start))
