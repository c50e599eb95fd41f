"""The first process of a node, what systemd is to a machine: mounts, services, and an orderly shutdown.

Run as `python -m stepcluster.nodeinit PLAN` inside namespaces of its own. SIGUSR1 shuts the node down the way a cloud
does that takes the machine back: those who asked for it are told and waited for, then everything ends.

A virtual machine runs its startup script instead of a kubelet. What the script enables, in a file of `services`, is
started on SIGUSR2, and whenever the machine starts.
"""

import asyncio
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stepcluster import logind, nodeimages
from stepcluster.layout import API_PORT
from stepcluster.machine import listens, run, say, wait_until

TORCH_PATH = Path("/opt/torch")
"""Path at which every node shows its pods the torch environment."""
OWN_FOLDERS = (Path("/opt"), Path("/var/lib"), Path("/var/log"))
"""Folders of the machine that the node sees, with what it writes there for itself alone."""
VM_FOLDERS = (*OWN_FOLDERS, Path("/etc"))
SPARED_PROGRAMS = ("modprobe", "sysctl", "systemctl")
"""What a startup script of a machine of its own calls, and would change for the machine that all nodes share."""
RESTART_DELAY_S = 1.0
KERNEL_SETTINGS = {"vm/overcommit_memory": "1", "kernel/panic": "10", "kernel/panic_on_oops": "1"}
"""A kubelet writes these and refuses to start if it can't."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VmPlan:
    """What only a virtual machine has."""

    name: str
    metadata_address: str
    folder: str
    """Holds `metadata.json` and `startup-script`."""
    ca: str
    """Path of the cluster's certificate authority."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    folder: str
    kube: str
    api_host: str
    kubelet_arguments: tuple[str, ...]
    torch_folder: str
    vm: VmPlan | None = None

    @property
    def services(self) -> Path:
        """The folder with one file for each program that the startup script has enabled."""
        return Path(self.folder) / "services"


def read_plan(path: Path) -> NodePlan:
    values = json.loads(path.read_text(encoding="utf-8"))
    vm = VmPlan(**values.pop("vm")) if values["vm"] else values.pop("vm")
    return NodePlan(**{**values, "kubelet_arguments": tuple(values["kubelet_arguments"]), "vm": vm})


class Services:
    """The node's programs, each started again when it ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[int, tuple[str, list[str], subprocess.Popen[bytes]]] = {}
        """Without arguments: what isn't started again."""

    def start(self, name: str, argv: list[str]) -> None:
        """Start the program; its output goes to `<name>.log` in the node's folder."""
        process = self._start(name, argv)
        self._running[process.pid] = (name, argv, process)

    def start_enabled(self, folder: Path) -> None:
        """Start what has a file in `folder`, a JSON list of its arguments, and doesn't run yet."""
        running = {name for name, _, _ in self._running.values()}
        for path in sorted(folder.glob("*.json")):
            if path.stem not in running:
                self.start(path.stem, json.loads(path.read_text(encoding="utf-8")))

    def run_once(self, name: str, argv: list[str], environment: Mapping[str, str]) -> None:
        process = self._start(name, argv, environment)
        self._running[process.pid] = (name, [], process)

    def _start(
        self, name: str, argv: list[str], environment: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        with (self._folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd="/"
            )

    def reap(self, loop: asyncio.AbstractEventLoop) -> None:
        """Children that ended are waited for, services among them are due to start again."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._running:
                name, argv, process = self._running.pop(pid)
                process.returncode = os.waitstatus_to_exitcode(status)
                say(f"{name} ended with {process.returncode}")
                if argv:
                    loop.call_later(RESTART_DELAY_S, self.start, name, argv)


def prepare_mounts(plan: NodePlan) -> None:
    """Mount folders of the node's own over the machine's; the rest of the machine's files stay visible."""
    folder = Path(plan.folder)
    run(["mount", "--make-rshared", "/"])
    for lower in VM_FOLDERS if plan.vm else OWN_FOLDERS:
        upper, work = (folder / "own" / f"{lower.name}-{part}" for part in ("files", "work"))
        upper.mkdir(parents=True, exist_ok=True)
        work.mkdir(exist_ok=True)
        folders = f"lowerdir={lower},upperdir={upper},workdir={work}"
        run(["mount", "-t", "overlay", "-o", folders, "overlay", lower])
    run(["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run"])
    settings = folder / "kernel-settings"
    settings.mkdir(exist_ok=True)
    for name, value in KERNEL_SETTINGS.items():
        # Files in their place: the machine's own settings stay as they are.
        stand_in = settings / name.replace("/", ".")
        stand_in.write_text(value + "\n", encoding="utf-8")
        run(["mount", "--bind", str(stand_in), f"/proc/sys/{name}"])
    TORCH_PATH.mkdir(exist_ok=True)
    run(["mount", "--bind", plan.torch_folder, str(TORCH_PATH)])
    run(["mount", "-o", "remount,bind,ro", str(TORCH_PATH)])


def start_services(plan: NodePlan, services: Services) -> None:
    """D-Bus and containerd with its images are started, each after what it needs; then the API server is waited for."""
    folder = Path(plan.folder)
    Path(logind.BUS_SOCKET).parent.mkdir(parents=True)
    bus_configuration = folder / "dbus.conf"
    bus_configuration.write_text(logind.BUS_CONFIGURATION, encoding="utf-8")
    services.start("dbus", ["dbus-daemon", f"--config-file={bus_configuration}", "--nofork", "--nopidfile"])
    services.start("containerd", ["containerd", f"--config={folder / 'containerd.toml'}"])
    containerd_socket = folder / "containerd.sock"
    log = folder / "containerd.log"
    wait_until(lambda: _answers(containerd_socket), "containerd", timeout_s=120, log=log, poll_s=0.05)
    nodeimages.import_missing(folder, run)
    wait_until(lambda: listens(plan.api_host, API_PORT), "the API server", timeout_s=300)


def start_vm(plan: NodePlan, vm: VmPlan, services: Services) -> None:
    """Start the metadata server, what was enabled before the machine was last off, and the startup script."""
    socket.sethostname(vm.name)
    programs = write_programs(plan)
    files = Path(vm.folder)
    services.start(
        "metadata",
        [sys.executable, "-m", "stepcluster.vms.metadata", vm.metadata_address, str(files / "metadata.json")],
    )
    services.start_enabled(plan.services)
    environment = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "GCE_METADATA_HOST": vm.metadata_address,
    }
    services.run_once("startup-script", [str(files / "startup-script")], environment)


def write_programs(plan: NodePlan) -> Path:
    """Write what a startup script calls to join, into a folder for its PATH."""
    folder = Path(plan.folder) / "bin"
    folder.mkdir(exist_ok=True)
    programs = {
        "kubelet": [plan.kube, "kubelet"],
        "kubeadm": [sys.executable, "-m", "stepcluster.vms.kubeadm", str(Path(plan.folder) / "plan.json")],
        **{name: ["echo", f"{name}: nothing is changed here:"] for name in SPARED_PROGRAMS},
    }
    for name, argv in programs.items():
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec {shlex.join(argv)} "$@"\n', encoding="utf-8")
        program.chmod(0o755)
    return folder


async def main(plan: NodePlan) -> None:
    loop = asyncio.get_running_loop()
    folder = Path(plan.folder)
    (folder / "containerd.sock").unlink(missing_ok=True)
    started = time.monotonic()
    prepare_mounts(plan)
    services = Services(folder)
    start_services(plan, services)
    login_manager = await logind.serve()
    off = asyncio.Event()
    loop.add_signal_handler(signal.SIGCHLD, services.reap, loop)
    loop.add_signal_handler(signal.SIGUSR1, off.set)
    if plan.vm:
        loop.add_signal_handler(signal.SIGUSR2, services.start_enabled, plan.services)
        start_vm(plan, plan.vm, services)
    else:
        services.start("kubelet", [plan.kube, "kubelet", *plan.kubelet_arguments])
    say(f"kubelet or startup script started after {time.monotonic() - started:.1f} s")
    services.reap(loop)
    await off.wait()
    say("shutting down")
    login_manager.PrepareForShutdown(True)
    await login_manager.released()
    say("off")


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(path))
        except OSError:
            return False
        return True


if __name__ == "__main__":
    asyncio.run(main(read_plan(Path(sys.argv[1]))))
