"""The programs that come from the distribution, installed by name, and only those that are missing."""

import os
import shutil
from pathlib import Path

from stepcluster.errors import CommandError, UnsupportedMachineError
from stepcluster.machine import require_root, run, say, search_path

CNI_FOLDERS = (Path("/usr/lib/cni"), Path("/opt/cni/bin"))
INSTALL_TIMEOUT_S = 900.0

PACKAGE_OF = {
    "containerd": "containerd",
    "containerd-shim-runc-v2": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "nft": "nftables",
    "ip": "iproute2",
    "mount": "mount",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "dbus-daemon": "dbus",
    # Commands of the documentation, which tests run as they stand.
    "curl": "curl",
    "jq": "jq",
}
"""Program, package that has it in Debian and Ubuntu."""


def cni_folder() -> Path | None:
    """Return the folder with the plugins `ptp` and `host-local`, if there is one."""
    plugins = ("ptp", "host-local")
    return next((folder for folder in CNI_FOLDERS if all((folder / name).exists() for name in plugins)), None)


def missing_packages() -> tuple[str, ...]:
    """Return the names of the packages to install, sorted."""
    path = search_path()
    names = {package for program, package in PACKAGE_OF.items() if shutil.which(program, path=path) is None}
    if cni_folder() is None:
        names.add("containernetworking-plugins")
    if not Path("/bin/busybox").exists() and not Path("/usr/bin/busybox").exists():
        names.add("busybox-static")
    return tuple(sorted(names))


def ensure() -> None:
    """Install the programs from the distribution that are missing, and leave no service running for them."""
    names = missing_packages()
    if not names:
        return
    require_root()
    if shutil.which("apt-get") is None:
        raise UnsupportedMachineError(f"there is no apt-get here; install what has: {' '.join(names)}")
    say(f"cluster packages: installing {' '.join(names)}")
    had_service = _containerd_runs()
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "--no-install-recommends", *names]
    try:
        run(["apt-get", "update"], env=environment, timeout_s=INSTALL_TIMEOUT_S)
        run(install, env=environment, timeout_s=INSTALL_TIMEOUT_S)
    except CommandError as error:
        raise UnsupportedMachineError(f"could not install {' '.join(names)}: {error}") from error
    if "containerd" in names and not had_service and _containerd_runs():
        # The cluster's nodes run their own; the package starts one that nobody asked for.
        run(["systemctl", "disable", "--now", "containerd.service"])


def _containerd_runs() -> bool:
    if shutil.which("systemctl") is None or not Path("/run/systemd/system").exists():
        return False
    try:
        shown = run(["systemctl", "show", "--property=ActiveState", "containerd.service"])
    except CommandError:
        # Without a running systemd there is no service either.
        return False
    return shown.strip().endswith("=active")
