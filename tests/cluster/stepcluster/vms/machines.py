"""Start and stop the virtual machines of a running cluster."""

import contextlib
import shutil
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stepcluster import certificates, images, nodeimages, state
from stepcluster.errors import FaultError, NoClusterError, StartError
from stepcluster.nodes import OFF_TIMEOUT_S, Node
from stepcluster.parts import Parts
from stepcluster.vms import records

LOCK = "vms"
"""Folder of the cluster that is locked while machines are written down, with the list of images that each gets."""
GRACE_S = 30.0
"""What a cloud leaves a Spot machine from its notice to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualMachines:
    parts: Parts

    def names(self) -> tuple[str, ...]:
        return tuple(node.name for node in records.read_all(self.parts.layout))

    def is_on(self, name: str) -> bool:
        """Return True if it runs; False also if there is none of this name."""
        return self.parts.runner.is_on(name)

    def start(
        self, name: str, *, metadata: Mapping[str, str], startup_script: str, tpu_chips: int = 4
    ) -> Node:
        """Start a machine, new or with its disk as it was; its script is to make a kubelet join.

        Raises:
            FaultError: It is on already.
        """
        layout, runner = self.parts.layout, self.parts.runner
        with state.lock(layout.folder / LOCK):
            if runner.is_on(name):
                raise FaultError(f"virtual machine {name} is on already")
            node = records.read(layout, name) or records.create(
                layout,
                name,
                n_fixed=len(self.parts.record.nodes),
                tpu_chips=tpu_chips,
                metadata={**metadata, "startup-script": startup_script},
                startup_script=startup_script,
            )
        certificates.issue_serving(certificates.load_authority(layout.certificates), layout, name)
        for archive in (images.pause(self.parts.binaries), *self._images()):
            nodeimages.remember(layout.node_folder(name), archive)
        runner.start(node)
        return node

    def wait_joined(self, name: str) -> None:
        """Wait until the machine's node is Ready, and give it its TPU chips, as a device plugin would."""
        node = self._get(name)
        log = self.parts.layout.node_folder(name) / "startup-script.log"
        self.parts.wait_ready(node, log=log)

    def stop(self, name: str, *, grace_s: float = GRACE_S, delete: bool = True) -> None:
        """End a machine. Its Node object stays; so does its disk, unless it is to `delete` that.

        It is shut down in order, for at most `grace_s`, before its power is cut.
        """
        node, runner = self._get(name), self.parts.runner
        if runner.is_on(node.name):
            if grace_s > 0:
                runner.tell(name, signal.SIGUSR1)
                with contextlib.suppress(StartError):
                    # Nobody asks a machine whether it is done.
                    runner.wait_off(name, timeout_s=grace_s)
            runner.tell(name, signal.SIGKILL)
            runner.wait_off(name, timeout_s=OFF_TIMEOUT_S)
        if delete:
            shutil.rmtree(self.parts.layout.node_folder(name))
            for path in self.parts.layout.certificates.glob(f"kubelet-{name}.*"):
                path.unlink()

    def console(self, name: str) -> str:
        """Return what the machine's startup script has printed, all starts after one another."""
        path = self.parts.layout.node_folder(self._get(name).name) / "startup-script.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def remember_image(self, archive: Path) -> None:
        """Import an image on all machines that run, and on all that will."""
        with state.lock(self.parts.layout.folder / LOCK):
            nodeimages.remember(self.parts.layout.folder / LOCK, archive)
        for name in self.names():
            self.parts.runner.import_image(name, archive)

    def _images(self) -> tuple[Path, ...]:
        return nodeimages.known(self.parts.layout.folder / LOCK)

    def _get(self, name: str) -> Node:
        node = records.read(self.parts.layout, name)
        if node is None:
            known = ", ".join(self.names()) or "none"
            raise NoClusterError(f"there is no virtual machine {name!r}; there are: {known}")
        return node
