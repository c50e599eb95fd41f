"""Find the mount that a folder is on, from the text of /proc/self/mountinfo."""

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final
from urllib.parse import quote

__all__ = ["Mount", "gcsfuse_uri", "is_mount_point", "mount_of", "parse_mountinfo", "read_mountinfo"]

_MOUNTINFO: Final = Path("/proc/self/mountinfo")
_OCTAL: Final = re.compile(r"\\([0-7]{3})")
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9_.-]{1,220}[a-z0-9]")
_NO_BUCKETS: Final = frozenset({"gcsfuse", "fuse", "none"})
"""Sources of mounts that show all buckets as folders, or that say nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """One mount of this process."""

    number: int
    parent: int
    root: str
    """The folder of the file system that is mounted: not '/' for a bind mount, as a volume's subPath makes one."""

    mount_point: str
    fstype: str
    source: str


def read_mountinfo() -> str:
    """Read what this process has mounted; nothing on a system that doesn't say."""
    try:
        return _MOUNTINFO.read_text(errors="surrogateescape")
    except OSError:
        return ""


def parse_mountinfo(text: str) -> tuple[Mount, ...]:
    """Parse the mounts, in the order in which they were made. Lines that aren't mounts are left out."""
    mounts = []
    for line in text.splitlines():
        before, separator, after = line.partition(" - ")
        fields, kinds = before.split(" "), after.split(" ")
        if not separator or len(fields) < 6 or len(kinds) < 2 or not (fields[0] + fields[1]).isdecimal():
            continue
        mounts.append(
            Mount(
                number=int(fields[0]),
                parent=int(fields[1]),
                root=_unescaped(fields[3]),
                mount_point=_unescaped(fields[4]),
                fstype=kinds[0],
                source=_unescaped(kinds[1]),
            )
        )
    return tuple(mounts)


def mount_of(text: str, path: PurePosixPath) -> Mount | None:
    """Find the mount that `path`, absolute and without links, is on; as the kernel finds it, from '/' down.

    A mount over a folder hides what was mounted below that folder before.
    """
    mounts = parse_mountinfo(text)
    numbers = {mount.number for mount in mounts}
    current: Mount | None = None
    for place in map(str, (*reversed(path.parents), path)):
        while True:
            above = current
            on_top = [
                mount
                for mount in mounts
                if mount.mount_point == place
                and mount is not above
                and (
                    mount.parent == above.number
                    if above
                    else mount.parent not in numbers or mount.parent == mount.number
                )
            ]
            if not on_top:
                break
            current = on_top[-1]
    return current


def is_mount_point(text: str, path: PurePosixPath) -> bool:
    """Tell whether something is mounted at `path`, absolute and without links.

    A folder of the file system above it that is mounted there counts too.
    """
    mount = mount_of(text, path)
    return mount is not None and mount.mount_point == str(path)


def gcsfuse_uri(text: str, path: PurePosixPath) -> str | None:
    """Find the gs:// URI of a folder that Cloud Storage FUSE has mounted; None for any other folder.

    It is as exact as the mount tells. GKE's driver mounts by itself, without a subtype: its mounts are
    recognised by their source, the bucket's bare name.
    """
    mount = mount_of(text, path)
    if mount is None:
        return None
    named = _BUCKET.fullmatch(mount.source) is not None and mount.source not in _NO_BUCKETS
    if mount.fstype != "fuse.gcsfuse" and not (
        mount.fstype == "fuse" and (named or mount.source == "gcsfuse")
    ):
        return None
    below = path.relative_to(mount.mount_point)
    inside = PurePosixPath(mount.root.lstrip("/")) / below
    return "gs://" + quote(
        "/".join(part for part in (mount.source if named else "", str(inside)) if part not in ("", "."))
    )


def _unescaped(field: str) -> str:
    """Decode the kernel's octal digits for space, tab, newline, '#' and the backslash."""
    return _OCTAL.sub(lambda found: chr(int(found[1], 8)), field)
