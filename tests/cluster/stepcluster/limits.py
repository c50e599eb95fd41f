"""The one setting of the machine that a cluster changes, and puts back."""

from pathlib import Path

INOTIFY_INSTANCES = Path("/proc/sys/fs/inotify/max_user_instances")
WANTED = 2048
"""Each program of the cluster watches some files; two clusters reach the 128 that Linux allows a user."""
MEMO = "max_user_instances.before"


def raise_limits(folder: Path, setting: Path = INOTIFY_INSTANCES) -> None:
    """Raise the setting if need be. Its old value is kept in `folder`, which all clusters of the machine share."""
    value = setting.read_text(encoding="utf-8").strip()
    if int(value) < WANTED:
        memo = folder / MEMO
        if not memo.exists():
            memo.write_text(value, encoding="utf-8")
        setting.write_text(str(WANTED), encoding="utf-8")


def restore_limits(folder: Path, setting: Path = INOTIFY_INSTANCES) -> None:
    """Restore the setting from before the first cluster, unless somebody has changed it since."""
    memo = folder / MEMO
    if memo.exists():
        if setting.read_text(encoding="utf-8").strip() == str(WANTED):
            setting.write_text(memo.read_text(encoding="utf-8"), encoding="utf-8")
        memo.unlink()
