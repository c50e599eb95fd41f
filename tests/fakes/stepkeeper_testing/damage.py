"""Damage to a file, as a disk does it, and what the files of a folder hold."""

from pathlib import Path


def flip(path: Path, place: int = -1) -> None:
    """Change one bit of the byte at `place`."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
