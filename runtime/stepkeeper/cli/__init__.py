"""The command `stepkeeper`: what a root holds, whether it is whole, cleaning up. Needs the extra `cli`, no torch."""

import sys

__all__ = ["main"]


def main() -> None:
    """The process has done what its command line says, and exits."""
    try:
        from stepkeeper.cli.app import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("typer", "rich"):
            raise
        sys.exit(f"stepkeeper: {error.name} isn't installed: pip install 'stepkeeper[cli]'")
    app(prog_name="stepkeeper")
