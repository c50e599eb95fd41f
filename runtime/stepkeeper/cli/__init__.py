"""Run the command `stepkeeper`: show what a root holds, verify it, clean it up. Needs the extra `cli`, no torch."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line of this process, and exit."""
    try:
        from stepkeeper.cli.app import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("typer", "rich"):
            raise
        sys.exit(f"stepkeeper: {error.name} isn't installed: pip install 'stepkeeper[cli]'")
    app(prog_name="stepkeeper")
