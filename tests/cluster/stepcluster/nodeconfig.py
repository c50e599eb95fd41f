"""The configuration files of a node's containerd, network plugin and kubelet."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from stepcluster import layout as places
from stepcluster.layout import Layout
from stepcluster.packages import CNI_FOLDERS, cni_folder

PAUSE_IMAGE = "localhost/pause:1"
SHUTDOWN_S = 30
SHUTDOWN_CRITICAL_S = 15
"""GKE gives a Spot node 30 s: its pods get what is left after 15 s kept for critical ones."""
LEASE_S = 16
"""A kubelet renews its lease every quarter of this: 5 times within the grace of a silent node."""

CONTAINERD = """\
version = 2
root = "{folder}/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs"]
[grpc]
  address = "{folder}/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
  path = "{folder}/containerd-opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  # Lowering it needs a capability that root doesn't have everywhere.
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{cni}"
    conf_dir = "{folder}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
"""


def write(layout: Layout, node: str, number: int, taints: Sequence[Mapping[str, str]]) -> None:
    folder = layout.node_folder(node)
    (folder / "cni").mkdir(parents=True, exist_ok=True)
    cni = cni_folder() or CNI_FOLDERS[0]
    text = CONTAINERD.format(folder=folder, cni=cni, pause=PAUSE_IMAGE)
    (folder / "containerd.toml").write_text(text, encoding="utf-8")
    (folder / "cni" / "10-pods.conflist").write_text(json.dumps(_network(layout, number)), encoding="utf-8")
    kubelet = kubelet_configuration(layout, node, number, taints)
    (folder / "kubelet.yaml").write_text(json.dumps(kubelet), encoding="utf-8")
    # No name server: what is outside can't be reached anyway, and names inside come from the cluster's DNS.
    (folder / "resolv.conf").write_text("", encoding="utf-8")


def kubelet_arguments(layout: Layout, node: str, labels: Mapping[str, str]) -> tuple[str, ...]:
    folder = layout.node_folder(node)
    return (
        f"--config={folder / 'kubelet.yaml'}",
        f"--kubeconfig={layout.certificates / f'{node}.kubeconfig'}",
        f"--hostname-override={node}",
        f"--node-ip={layout.address}",
        f"--root-dir={folder / 'kubelet'}",
        f"--cert-dir={folder / 'kubelet' / 'pki'}",
        "--node-labels=" + ",".join(f"{key}={value}" for key, value in labels.items()),
    )


def kubelet_configuration(
    layout: Layout, node: str, number: int, taints: Sequence[Mapping[str, str]]
) -> dict[str, object]:
    folder = layout.node_folder(node)
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        **_authentication(layout, node),
        "port": places.KUBELET_PORT + number,
        "healthzPort": places.KUBELET_HEALTH_PORT + number,
        "readOnlyPort": 0,
        "containerRuntimeEndpoint": f"unix://{folder / 'containerd.sock'}",
        "imageServiceEndpoint": f"unix://{folder / 'containerd.sock'}",
        "clusterDNS": [str(layout.dns_service_address)],
        "clusterDomain": "cluster.local",
        "resolvConf": str(folder / "resolv.conf"),
        "podLogsDir": str(folder / "pod-logs"),
        "volumePluginDir": str(folder / "volume-plugins"),
        "registerWithTaints": [dict(taint) for taint in taints],
        # Groups: below one of ours, of either version, and with what root is allowed here.
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{layout.cgroup_name(node)}",
        "failCgroupV1": False,
        "enforceNodeAllocatable": ["pods"],
        "oomScoreAdj": 0,
        "failSwapOn": False,
        "makeIPTablesUtilChains": False,
        # The machine's disk and memory are shared by all nodes: a node must not clean up for another's sake.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"memory.available": "50Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "evictionPressureTransitionPeriod": "10s",
        "nodeStatusUpdateFrequency": "4s",
        "nodeLeaseDurationSeconds": LEASE_S,
        "shutdownGracePeriod": f"{SHUTDOWN_S}s",
        "shutdownGracePeriodCriticalPods": f"{SHUTDOWN_CRITICAL_S}s",
        "maxPods": 60,
    }


def _authentication(layout: Layout, node: str) -> dict[str, object]:
    certificates = layout.certificates
    return {
        "tlsCertFile": str(certificates / f"kubelet-{node}.crt"),
        "tlsPrivateKeyFile": str(certificates / f"kubelet-{node}.key"),
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(certificates / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
    }


def _network(layout: Layout, number: int) -> dict[str, object]:
    """Put each pod on a cable of its own: all traffic is routed, so the proxy sees it in both directions."""
    addresses = {
        "type": "host-local",
        # On /run: addresses that pods had before a power cut are free again after it.
        "dataDir": str(Path("/run/cni")),
        "ranges": [[{"subnet": str(layout.pod_network(number))}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    return {
        "cniVersion": "1.0.0",
        "name": "pods",
        "plugins": [{"type": "ptp", "ipMasq": False, "ipam": addresses}],
    }
