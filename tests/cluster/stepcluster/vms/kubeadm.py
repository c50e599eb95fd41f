"""`kubeadm join` of a test cluster's virtual machine: the part of it that a startup script sees.

It takes the JoinConfiguration that the real one takes, proves the cluster by the pinned key of its authority, and
enables a kubelet that asks for its own certificate with the token (TLS bootstrapping). It looks at no kernel modules or
swap, and fetches no configuration: the cluster's kubelet configuration is the file beside the plan.
"""

import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from stepcluster import certificates
from stepcluster.layout import API_PORT
from stepcluster.nodeinit import NodePlan, VmPlan, read_plan

KUBERNETES = Path("/etc/kubernetes")
KUBECONFIG = KUBERNETES / "kubelet.conf"
BOOTSTRAP = KUBERNETES / "bootstrap-kubelet.conf"
API_VERSION = "kubeadm.k8s.io/v1beta4"
PATCH = "kubeletconfiguration+merge.yaml"
OWN_SETTINGS = ("port", "healthzPort", "containerRuntimeEndpoint", "cgroupRoot")
"""Settings that keep the nodes of one machine apart: no patch may change them."""


class JoinError(Exception):
    """The node can't join; the message says why."""


def main(arguments: list[str]) -> int:
    plan = read_plan(Path(arguments[0]))
    assert plan.vm is not None
    if arguments[1:3] != ["join", "--config"] or len(arguments) != 4:
        print(f"kubeadm: only `join --config FILE` is known here, not {arguments[1:]}", file=sys.stderr)
        return 2
    try:
        join(plan, plan.vm, yaml.safe_load(Path(arguments[3]).read_text(encoding="utf-8")))
    except JoinError as error:
        print(f"kubeadm: {error}", file=sys.stderr)
        return 1
    return 0


def join(plan: NodePlan, vm: VmPlan, configuration: Mapping[str, Any]) -> None:
    """Write the kubelet's files and enable it."""
    if (configuration.get("apiVersion"), configuration.get("kind")) != (API_VERSION, "JoinConfiguration"):
        raise JoinError(f"the file is no JoinConfiguration of {API_VERSION}")
    if KUBECONFIG.exists():
        raise JoinError(f"{KUBECONFIG} already exists")
    token = _discover(plan, vm, configuration["discovery"]["bootstrapToken"])
    KUBERNETES.mkdir(exist_ok=True)
    BOOTSTRAP.write_text(json.dumps(_kubeconfig(plan, vm, token)), encoding="utf-8")
    BOOTSTRAP.chmod(0o600)
    registration = configuration.get("nodeRegistration") or {}
    patches = Path((configuration.get("patches") or {}).get("directory") or KUBERNETES / "patches")
    settings = _settings(plan, registration, patches)
    path = Path(plan.folder) / "kubelet-joined.yaml"
    path.write_text(json.dumps(settings), encoding="utf-8")
    argv = [plan.kube, "kubelet", *_arguments(plan, registration, path)]
    plan.services.mkdir(exist_ok=True)
    (plan.services / "kubelet.json").write_text(json.dumps(argv), encoding="utf-8")
    os.kill(1, signal.SIGUSR2)


def _discover(plan: NodePlan, vm: VmPlan, discovery: Mapping[str, Any]) -> str:
    """Return the token, once the endpoint and the pinned key are the cluster's."""
    if discovery["apiServerEndpoint"] != f"{plan.api_host}:{API_PORT}":
        raise JoinError(f"nothing answers at {discovery['apiServerEndpoint']}")
    pinned = certificates.hash_public_key(Path(vm.ca).read_bytes())
    if pinned not in discovery.get("caCertHashes", ()):
        raise JoinError(f"cluster CA found in cluster-info ConfigMap is invalid: {pinned} isn't pinned")
    return str(discovery["token"])


def _kubeconfig(plan: NodePlan, vm: VmPlan, token: str) -> dict[str, object]:
    cluster = {"server": f"https://{plan.api_host}:{API_PORT}", "certificate-authority": vm.ca}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "kubernetes", "cluster": cluster}],
        "users": [{"name": "tls-bootstrap-token-user", "user": {"token": token}}],
        "contexts": [
            {"name": "bootstrap", "context": {"cluster": "kubernetes", "user": "tls-bootstrap-token-user"}}
        ],
        "current-context": "bootstrap",
    }


def _settings(plan: NodePlan, registration: Mapping[str, Any], patches: Path) -> dict[str, Any]:
    """Return the cluster's kubelet configuration with the node's patch, and with its taints."""
    settings: dict[str, Any] = json.loads((Path(plan.folder) / "kubelet.yaml").read_text(encoding="utf-8"))
    patch = patches / PATCH
    changes = yaml.safe_load(patch.read_text(encoding="utf-8")) if patch.exists() else {}
    settings |= {key: value for key, value in changes.items() if key not in OWN_SETTINGS}
    return settings | {"registerWithTaints": registration.get("taints") or []}


def _arguments(plan: NodePlan, registration: Mapping[str, Any], path: Path) -> list[str]:
    folder = Path(plan.folder) / "kubelet"
    extra = registration.get("kubeletExtraArgs") or ()
    return [
        f"--config={path}",
        f"--bootstrap-kubeconfig={BOOTSTRAP}",
        f"--kubeconfig={KUBECONFIG}",
        f"--hostname-override={registration.get('name') or socket.gethostname()}",
        f"--node-ip={plan.api_host}",
        f"--root-dir={folder}",
        f"--cert-dir={folder / 'pki'}",
        *(f"--{each['name']}={each['value']}" for each in extra),
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
