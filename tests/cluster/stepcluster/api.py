"""Give tests, the demo and benchmarks a cluster as one object."""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stepcluster import controllers, images, lifecycle
from stepcluster.errors import NoClusterError
from stepcluster.faults import Faults
from stepcluster.machine import COMMAND_TIMEOUT_S, run, search_path
from stepcluster.nodes import SYSTEM_NODE
from stepcluster.parts import Parts
from stepcluster.vms import joining
from stepcluster.vms.joining import JoinTerms
from stepcluster.vms.machines import VirtualMachines


class Cluster:
    """A running cluster.

    Made by `cluster_up`, or by `Cluster.attach` for one that `make cluster` started.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.faults = Faults(parts=parts)
        self.vms = VirtualMachines(parts=parts)

    @classmethod
    def attach(cls, name: str = "dev") -> "Cluster":
        """Return the running cluster of this name. Raises NoClusterError if none is running."""
        return cls(Parts.attach(name))

    @property
    def name(self) -> str:
        return self._parts.record.name

    @property
    def folder(self) -> Path:
        """The folder of logs, certificates and the nodes' data."""
        return self._parts.layout.folder

    @property
    def kubeconfig(self) -> Path:
        return self._parts.layout.kubeconfig

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(node.name for node in self._parts.record.nodes)

    @property
    def tpu_nodes(self) -> tuple[str, ...]:
        return tuple(node.name for node in self._parts.record.nodes if node.tpu_chips)

    @property
    def host_address(self) -> str:
        """The machine's address that pods reach: what listens there is outside of the cluster."""
        return str(self._parts.layout.host_address)

    @property
    def gcs_url(self) -> str:
        """The object storage's URL, for pods and on this machine: the value of STORAGE_EMULATOR_HOST."""
        return self._parts.layout.gcs_url

    def audit_entries(self, user: str | None = None) -> list[dict[str, Any]]:
        """Return what the API server's audit log has of all requests that were answered, or of one user's."""
        return read_audit(self._parts.layout.audit_log.read_text(encoding="utf-8"), user)

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment variables that a shell needs to work with the cluster."""
        return {
            "KUBECONFIG": str(self.kubeconfig),
            "STORAGE_EMULATOR_HOST": self.gcs_url,
            "PATH": f"{self._parts.binaries.folder}:{os.environ.get('PATH', '')}",
        }

    def kubectl(
        self, *arguments: str | Path, stdin: str | None = None, timeout_s: float = COMMAND_TIMEOUT_S
    ) -> str:
        """Run kubectl and return its output. Raises CommandError, with the output, if it failed."""
        return run([*self._parts.kubectl, *arguments], stdin=stdin, timeout_s=timeout_s)

    def helm(self, *arguments: str | Path, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """Run helm and return its output. Raises CommandError, with the output, if it failed."""
        own = {
            f"HELM_{kind}_HOME": str(self.folder / "helm" / kind.lower())
            for kind in ("CACHE", "CONFIG", "DATA")
        }
        environment = {**os.environ, "PATH": search_path(), "KUBECONFIG": str(self.kubeconfig), **own}
        return run([self._parts.binaries["helm"], *arguments], env=environment, timeout_s=timeout_s)

    def wait_established(self, crd: str) -> None:
        """Objects of that CRD can be made. Raises StartError if that takes longer than two minutes."""
        self._parts.wait_established(crd)

    def load_image(self, archive: Path, *, nodes: Sequence[str] | None = None) -> None:
        """Import the image of an OCI archive on the nodes, by default all. A node that comes back as new has it too.

        Virtual machines, now and later, have what any node but the system node has.
        """
        chosen = nodes if nodes is not None else self.nodes
        for node in chosen:
            self._parts.runner.import_image(self._parts.node(node).name, archive)
        if tuple(chosen) != (SYSTEM_NODE,) or nodes is None:
            self.vms.remember_image(archive)

    def load_shell_image(self) -> str:
        """Import an image with busybox on all nodes, and return its name."""
        self.load_image(images.shell())
        return images.SHELL_IMAGE

    def load_operator_image(self, wheel: Path | None = None, *, tag: str = "dev") -> str:
        """Import the operator's image, of a wheel or this tree, on the system node, and return its name."""
        name, archive = images.operator(wheel, tag=tag)
        self.load_image(archive, nodes=[SYSTEM_NODE])
        return name

    def load_trainer_image(self, app: Path, *, name: str | None = None) -> str:
        """Import an image with the wheel, and with `app` at /app, on the TPU nodes, and return its name."""
        name, archive = images.trainer(app, name=name)
        self.load_image(archive, nodes=self.tpu_nodes)
        return name

    def start_kueue(self) -> None:
        """Start Kueue, built from its pinned module, for the rest of the cluster's life."""
        controllers.start_kueue(self._parts)

    def join_terms(self) -> JoinTerms:
        """Make a token with which machines can join for a day."""
        return joining.prepare(self._parts)

    def down(self) -> None:
        lifecycle.stop(self.name)


def read_audit(text: str, user: str | None) -> list[dict[str, Any]]:
    """Read the text of an audit log, whose last line may yet be being written.

    A request that was given up before it was authenticated has no user name.
    """
    entries = (json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n"))
    return [entry for entry in entries if user in {None, entry["user"].get("username")}]


@contextlib.contextmanager
def cluster_up(
    name: str = "dev", *, n_tpu_nodes: int = 2, topology: str = "2x2", keep: bool = False
) -> Iterator[Cluster]:
    """Start a cluster and take it down at the end of the block, also on Ctrl-C, unless `keep` is set."""
    cluster = Cluster(lifecycle.start(name, n_tpu_nodes=n_tpu_nodes, topology=topology))
    try:
        yield cluster
    finally:
        if not keep:
            with contextlib.suppress(NoClusterError):
                # Somebody may have taken it down by hand.
                cluster.down()
