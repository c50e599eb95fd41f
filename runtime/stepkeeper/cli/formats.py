"""Define the commands export and import, which need torch.

They convert commits to other programs' files, and such files to checkpoints.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Final, Literal
from urllib.parse import unquote, urlsplit

import typer

from stepkeeper.checkpoint.files import CommitFiles
from stepkeeper.cli.read import OneSequence, select_commit
from stepkeeper.cli.root import Root, open_root
from stepkeeper.cli.terminal import AsJson, ExitCode, print_message, progress_bar, show_document
from stepkeeper.errors import RefusedError, StepkeeperError, StorageError
from stepkeeper.log import CommitRecord
from stepkeeper.quantities import size_text

__all__ = ["export", "import_"]

_MIB: Final = 1 << 20
_SAFETENSORS: Final = ".safetensors"
_OPTION_NAMES: Final = {"overwrite=True": "--overwrite", 'values="leave_out"': "--leave-out-values"}
"""Python arguments that error messages name, and the options that set them here."""

Kind = Literal["torch", "safetensors"]
Convert = Callable[[Any, Callable[[int, int], None]], Any]
"""Converts a source, its first argument, to a fixed destination. Calls the second with the bytes done and in all."""

Source = Annotated[
    str, typer.Argument(metavar="URL", help="The root; or the path of a checkpoint's folder, without ://.")
]
Destination = Annotated[
    Path, typer.Argument(metavar="PATH", help="The file to write; for safetensors, a file or a folder.")
]
Step = Annotated[
    int | None, typer.Option("--step", metavar="STEP", min=0, help="The step. Default: the latest commit.")
]
ToKind = Annotated[
    Kind | None,
    typer.Option("--as", help="The format. Default: safetensors if PATH ends in .safetensors, else torch."),
]
FromPrefix = Annotated[
    str,
    typer.Option(
        "--prefix",
        metavar="NAME",
        help="Export only names below NAME, without that prefix; safetensors only.",
    ),
]
LeaveOutValues = Annotated[
    bool, typer.Option("--leave-out-values", help="Leave out values that aren't tensors; safetensors only.")
]
MaxShardMib = Annotated[
    int | None,
    typer.Option(
        "--max-shard", metavar="MIB", min=1, help="Greatest size of each file in a folder; safetensors only."
    ),
]
Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite",
        help="Replace the file; or the folder, if it holds only files that this command writes.",
    ),
]


def export(
    context: typer.Context,
    source: Source,
    destination: Destination,
    *,
    step: Step = None,
    sequence: OneSequence = None,
    kind: ToKind = None,
    prefix: FromPrefix = "",
    leave_out_values: LeaveOutValues = False,
    max_shard_mib: MaxShardMib = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write a commit as a torch.save file or as safetensors.

    Every block is verified as it is read. Needs torch.
    """
    one_file = destination.suffix == _SAFETENSORS
    if kind == "safetensors" or (kind is None and one_file):
        if max_shard_mib and one_file:
            raise typer.BadParameter(
                f"--max-shard writes a folder of files, but {destination} names one file"
            )
        write = partial(
            _import_formats().checkpoint_to_safetensors,
            prefix=prefix,
            values="leave_out" if leave_out_values else "refuse",
            max_shard_bytes=max_shard_mib and max_shard_mib * _MIB,
        )
    else:
        if prefix or leave_out_values or max_shard_mib:
            raise typer.BadParameter("--prefix, --leave-out-values and --max-shard are for safetensors")
        write = _import_formats().checkpoint_to_torch_save
    convert = _bind_destination(write, destination, overwrite=overwrite)
    # A folder with .metadata is one checkpoint, not a root.
    if "://" in source or not (Path(source) / ".metadata").exists():
        with open_root(context, source) as root:
            record = select_commit(root.open_log(), step, sequence)
            _export_commit(root, record, destination, convert, as_json)
        return
    if step is not None or sequence is not None:
        raise typer.BadParameter(
            f"{source} is the folder of one checkpoint, which has no steps; give its root"
        )
    done = _convert_with_progress(convert, Path(source), f"export {source}")
    _show(Path(source).absolute().as_uri(), done, destination, {}, f"exported {source}", as_json=as_json)


def _export_commit(
    root: Root, record: CommitRecord, destination: Path, convert: Convert, as_json: bool
) -> None:
    _check_outside(root, destination)
    with root.reading(record), CommitFiles(root.store, record, patience=root.patience) as files:
        done = _convert_with_progress(convert, files, f"export step {record.step}")
    document = {"sequence": record.slot, "step": record.step, "commit_uri": f"{root.uri}/{record.folder}"}
    what = f"exported step {record.step} (sequence {record.slot})"
    _show(root.uri, done, destination, document, what, as_json=as_json)


def import_(
    source: Annotated[
        Path,
        typer.Argument(metavar="PATH", help="A torch.save file; or a safetensors file, folder or index."),
    ],
    destination: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The checkpoint's folder, which is made.")
    ],
    *,
    kind: Annotated[
        Kind | None,
        typer.Option("--as", help="The format of PATH. Default: by its name; a folder is safetensors."),
    ] = None,
    prefix: Annotated[
        str, typer.Option("--prefix", metavar="NAME", help="Put all names below NAME; safetensors only.")
    ] = "",
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Make a folder of a torch.save file or safetensors.

    No code in them is run. Stock DCP loads the folder. Needs torch.
    """
    looks_so = source.is_dir() or source.name.endswith((_SAFETENSORS, ".json"))
    if kind == "safetensors" or (kind is None and looks_so):
        write = partial(_import_formats().safetensors_to_checkpoint, prefix=prefix)
    elif prefix:
        raise typer.BadParameter("--prefix is for safetensors")
    else:
        write = _import_formats().torch_save_to_checkpoint
    convert = _bind_destination(write, destination, overwrite=overwrite)
    done = _convert_with_progress(convert, source, f"import {source}")
    _show(source.absolute().as_uri(), done, destination, {}, f"imported {source}", as_json=as_json)


def _bind_destination(write: Callable[..., Any], destination: Path, *, overwrite: bool) -> Convert:
    return lambda source, progress: write(source, destination, overwrite=overwrite, progress=progress)


def _import_formats() -> ModuleType:
    """Import the conversions, and with them torch, which no other command needs."""
    try:
        from stepkeeper_planners import formats
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("torch", "numpy", "safetensors"):
            raise
        print_message(
            f"this command needs {error.name}, which isn't installed: pip install 'stepkeeper[cli,torch]'"
        )
        raise typer.Exit(ExitCode.USAGE) from error
    return formats


def _convert_with_progress(convert: Convert, source: object, title: str) -> Any:
    with _as_command_errors(), progress_bar(title) as show:
        return convert(source, lambda done, total: show(completed=done, total=total))


@contextmanager
def _as_command_errors() -> Iterator[None]:
    """Convert the errors of a conversion to those of a command."""
    from stepkeeper_planners.errors import DestinationExistsError, PlannerError

    try:
        yield
    except StepkeeperError:
        raise
    except PlannerError as error:
        # Its message names Python's arguments.
        message = str(error)
        for argument, option in _OPTION_NAMES.items():
            message = message.replace(argument, option)
        if isinstance(error, DestinationExistsError):
            raise RefusedError(message) from error
        print_message(message)
        raise typer.Exit(ExitCode.FINDING) from error
    except FileNotFoundError as error:
        print_message(str(error))
        raise typer.Exit(ExitCode.FINDING) from error
    except OSError as error:  # of the destination: no room, no permission
        raise StorageError(str(error)) from error


def _check_outside(root: Root, destination: Path) -> None:
    parts = urlsplit(root.uri)
    if parts.scheme == "file" and destination.resolve().is_relative_to(Path(unquote(parts.path)).resolve()):
        text = f"{destination} is in the root itself, where only its job writes; choose another place"
        raise RefusedError(text)


def _show(
    uri: str, done: Any, destination: Path, document: dict[str, Any], what: str, *, as_json: bool
) -> None:
    if as_json:
        about = {
            "path": str(destination),
            "files": [str(path) for path in done.files],
            "n_tensors": len(done.tensors),
            "tensor_bytes": done.tensor_bytes,
            "left_out": list(done.left_out),
        }
        show_document(uri, document | about)
        return
    left_out = f"; left out {len(done.left_out)}" if done.left_out else ""
    typer.echo(
        f"{what}: {len(done.tensors)} tensors, {size_text(done.tensor_bytes)}, to {destination}{left_out}"
    )
