"""Starting a cluster and ending it."""

import contextlib
import json
import sysconfig
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from stepcluster import (
    binaries,
    certificates,
    cleaning,
    controllers,
    controlplane,
    dns,
    gcs,
    images,
    network,
    packages,
    processes,
    state,
)
from stepcluster.errors import ClusterExistsError, CommandError, NoClusterError, StartError
from stepcluster.layout import Layout, check_name
from stepcluster.machine import is_passing, require_root, run, say, wait_until
from stepcluster.nodes import Node, choose_nodes
from stepcluster.parts import Parts

READY_TIMEOUT_S = 240.0

INOTIFY_INSTANCES = Path("/proc/sys/fs/inotify/max_user_instances")
WANTED_INSTANCES = 2048
"""Each program of the cluster watches some files; two clusters reach the 128 that Linux allows a user."""
MEMO = "max_user_instances.before"
"""In the folder of all clusters: the setting as it was before the first of them."""

_OF_TESTS = frozenset({"test", "slice", "lane"})
"""First words of the names of clusters that runs of tests start."""


def start(name: str, *, n_tpu_nodes: int = 2, topology: str = "2x2") -> Parts:
    """Start a cluster, and wait until its nodes are Ready, names resolve, JobSets run and the storage answers.

    If that fails, or on Ctrl-C, nothing of it is left. A crashed cluster of this name is cleaned up first.
    """
    return _start_alone(name, lambda programs: _start(name, programs, choose_nodes(n_tpu_nodes, topology)))


def start_api(name: str) -> Parts:
    """Start a cluster of etcd and the API server alone, without nodes and controllers; otherwise as `start`."""

    def start_parts(programs: binaries.Binaries) -> Parts:
        parts = _prepare(name, programs, ())
        controlplane.start_api(parts.launcher, programs, parts.layout)
        return parts

    return _start_alone(name, start_parts)


def _start_alone(name: str, start_parts: Callable[[binaries.Binaries], Parts]) -> Parts:
    """Start a cluster while no other process starts or stops one of this name."""
    require_root()
    check_name(name)
    packages.ensure()
    programs = binaries.ensure()
    folder = state.cluster_folder(name)
    with state.lock(folder):
        if state.is_running(name):
            raise ClusterExistsError(
                f"cluster {name!r} is running: use it, or `python -m stepcluster down --name {name}` first"
            )
        if any(state.cluster_folder(name).iterdir()):
            say(f"cluster {name}: cleaning up after one that was not taken down")
            _clean(name)
        try:
            return start_parts(programs)
        except BaseException:
            # Ctrl-C too: whoever started it half wants nothing of it.
            _remove(name)
            raise


def stop(name: str) -> None:
    """Remove everything of the cluster from the machine, whether it runs or has crashed.

    Raises:
        NoClusterError: There is no such cluster.
    """
    require_root()
    check_name(name)
    if name not in state.names():
        raise NoClusterError(f"there is no cluster {name!r}; there are: {', '.join(state.names()) or 'none'}")
    with state.lock(state.cluster_folder(name)):
        _remove(name)


def stop_abandoned() -> None:
    """Remove the clusters that runs of tests have left, since they were killed."""
    for name in filter(is_abandoned, state.names()):
        # Another run may be doing the same.
        with contextlib.suppress(NoClusterError):
            stop(name)


def is_abandoned(name: str) -> bool:
    """Return True if a run of tests started the cluster, whose process number ends its name, and is gone."""
    kind, _, rest = name.partition("-")
    pid = rest.rpartition("-")[2]
    return kind in _OF_TESTS and pid.isdigit() and not Path("/proc", pid).exists()


def _clean(name: str) -> None:
    others = [other for other in state.names() if other != name]
    cleaning.clean(_layout(name), others)


def _remove(name: str) -> None:
    _clean(name)
    state.cluster_folder(name).rmdir()
    with state.lock(state.state_root()):
        if not state.names():
            restore_limits(state.state_root())


def _start(name: str, programs: binaries.Binaries, nodes: tuple[Node, ...]) -> Parts:
    started = time.monotonic()

    def told(what: str) -> None:
        say(f"cluster {name}: {what} after {time.monotonic() - started:.1f} s")

    parts = _prepare(name, programs, nodes)
    _start_nodes(parts)
    controlplane.start(parts.launcher, programs, parts.layout)
    told("API server ready")
    parts.apply([*controllers.list_jobset_manifests(programs, parts.layout), *dns.manifests(parts.layout)])
    # Started before its CRD is served, the controller would look again only 10 s later.
    parts.wait_established(controllers.JOBSET_CRD)
    controllers.start_jobset(parts.launcher, programs, parts.layout)
    gcs.start(parts.launcher, programs, parts.layout)
    for node in nodes:
        parts.wait_ready(node)
    told("nodes ready")
    _wait_serving(parts)
    told("everything ready")
    return parts


def _prepare(name: str, programs: binaries.Binaries, nodes: tuple[Node, ...]) -> Parts:
    """Make a cluster with namespaces, addresses and certificates, in which nothing runs yet."""
    folder = state.cluster_folder(name)
    spaces = processes.start_namespaces(folder, folder / "logs" / "namespaces.log")
    with state.lock(state.state_root()):
        raise_limits(state.state_root())
        layout = Layout(name=name, block=network.free_block(), folder=folder)
        # Pods find this Python's packages, torch among them, at /opt/torch.
        torch_folder = sysconfig.get_path("purelib")
        record = state.Record(name=name, block=layout.block, nodes=nodes, torch_folder=torch_folder)
        state.write(record)
        network.connect(layout, spaces)
    authority = certificates.create_authority(layout.certificates, name)
    certificates.issue_all(authority, layout, [node.name for node in nodes])
    return Parts.of(record, programs)


def raise_limits(folder: Path) -> None:
    """Raise the one setting of the machine that a cluster changes, if need be."""
    value = INOTIFY_INSTANCES.read_text(encoding="utf-8").strip()
    if int(value) < WANTED_INSTANCES:
        memo = folder / MEMO
        if not memo.exists():
            memo.write_text(value, encoding="utf-8")
        INOTIFY_INSTANCES.write_text(str(WANTED_INSTANCES), encoding="utf-8")


def restore_limits(folder: Path) -> None:
    """Restore the setting, unless somebody has changed it since."""
    memo = folder / MEMO
    if memo.exists():
        if INOTIFY_INSTANCES.read_text(encoding="utf-8").strip() == str(WANTED_INSTANCES):
            INOTIFY_INSTANCES.write_text(memo.read_text(encoding="utf-8"), encoding="utf-8")
        memo.unlink()


def _start_nodes(parts: Parts) -> None:
    first_images = [images.pause(parts.binaries)]
    for node in parts.record.nodes:
        own = [images.coredns(parts.binaries)] if node.name == "system" else []
        for archive in first_images + own:
            parts.runner.import_image(node.name, archive)
        parts.runner.start(node)


def _wait_serving(parts: Parts) -> None:
    """Wait until names resolve, JobSet's webhooks answer and pods can be made."""

    def jobset_answers() -> bool:
        try:
            run([*parts.kubectl, "create", "--dry-run=server", "-f", "-"], stdin=json.dumps(_probe_jobset()))
        except CommandError as error:
            # Until its CRD is served there is no such kind.
            if is_passing(error) or "no matches for kind" in str(error):
                return False
            raise StartError(f"JobSet's controller does not work: {error}") from error
        return True

    log = parts.layout.logs / "jobset.log"
    wait_until(jobset_answers, "JobSet's webhooks", timeout_s=READY_TIMEOUT_S, log=log)
    wait = ["wait", "--for=condition=Available", f"--timeout={READY_TIMEOUT_S:.0f}s", "deployment/coredns"]
    run([*parts.kubectl, "-n", dns.NAMESPACE, *wait], timeout_s=READY_TIMEOUT_S + 10)
    run([*parts.kubectl, "wait", "--for=create", "--timeout=100s", "serviceaccount/default"])


def _probe_jobset() -> Mapping[str, object]:
    pod = {"restartPolicy": "Never", "containers": [{"name": "probe", "image": images.SHELL_IMAGE}]}
    job = {"name": "probe", "template": {"spec": {"template": {"spec": pod}}}}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "probe", "namespace": "default"},
        "spec": {"replicatedJobs": [job]},
    }


def _layout(name: str) -> Layout:
    """Return a cluster's layout, also if the cluster failed before it wrote its record."""
    record = state.read_file(name)
    return Layout(name=name, block=record.block if record else 0, folder=state.cluster_folder(name))
