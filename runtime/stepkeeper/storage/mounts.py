"""Find the mount that a folder is on, from the text of /proc/self/mountinfo."""

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final
from urllib.parse import quote

__all__ = ["BUCKET_NAME", "Mount", "gcsfuse_uri", "is_mount_point", "mount_of", "read_mountinfo"]

_MOUNTINFO: Final = Path("/proc/self/mountinfo")
_OCTAL: Final = re.compile(r"\\([0-7]{3})")
BUCKET_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_.-]{1,220}[a-z0-9]")
_NO_BUCKETS: Final = frozenset({"gcsfuse", "fuse", "none"})
"""Sources of mounts that show all buckets as folders, or that name no bucket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """One mount of this process."""

    root: str
    """The folder of the file system that is mounted: not '/' for a bind mount, such as a volume's subPath."""

    mount_point: str
    fstype: str
    source: str


def read_mountinfo() -> str:
    """Read the mounts of this process; nothing on a system that doesn't list them."""
    try:
        return _MOUNTINFO.read_text(errors="surrogateescape")
    except OSError:
        return ""


def mount_of(text: str, path: PurePosixPath) -> Mount | None:
    """Find the mount of `path`, which is absolute and without links: the last one that was made there or above."""
    found: Mount | None = None
    for line in text.splitlines():
        # In proc(5): id, parent, device, root, mount point, options - type, source, options.
        before, _, after = line.partition(" - ")
        fields, kinds = before.split(" "), after.split(" ")
        is_complete = len(fields) >= 6 and len(kinds) >= 2
        if is_complete and path.is_relative_to(_unescaped(fields[4])):
            found = Mount(
                root=_unescaped(fields[3]),
                mount_point=_unescaped(fields[4]),
                fstype=kinds[0],
                source=_unescaped(kinds[1]),
            )
    return found


def is_mount_point(text: str, path: PurePosixPath) -> bool:
    """Return True if something, also a bind mount, is mounted at `path`, absolute and without links."""
    mount = mount_of(text, path)
    return mount is not None and mount.mount_point == str(path)


def gcsfuse_uri(text: str, path: PurePosixPath) -> str | None:
    """Find the gs:// URI of a folder that Cloud Storage FUSE has mounted; None for any other folder.

    It is as exact as the mount's entry. GKE's driver mounts without a subtype: its mounts are recognized by
    their source, the bucket's bare name.
    """
    mount = mount_of(text, path)
    if mount is None:
        return None
    named = BUCKET_NAME.fullmatch(mount.source) is not None and mount.source not in _NO_BUCKETS
    is_gke_mount = mount.fstype == "fuse" and (named or mount.source == "gcsfuse")
    if mount.fstype != "fuse.gcsfuse" and not is_gke_mount:
        return None
    inside = PurePosixPath(mount.root.lstrip("/")) / path.relative_to(mount.mount_point)
    parts = (mount.source if named else "", str(inside))
    return "gs://" + quote("/".join(part for part in parts if part not in ("", ".")))


def _unescaped(field: str) -> str:
    """Decode the kernel's octal digits for space, tab, newline, '#' and the backslash."""
    return _OCTAL.sub(lambda found: chr(int(found[1], 8)), field)
