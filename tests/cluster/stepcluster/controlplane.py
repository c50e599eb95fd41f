"""The control plane's programs and their arguments."""

import json
import ssl
import urllib.error
import urllib.request

from stepcluster import layout as places
from stepcluster.binaries import Binaries
from stepcluster.layout import Layout
from stepcluster.machine import listens, wait_until
from stepcluster.processes import Launcher

NODE_MONITOR_GRACE_S = 20
"""Kubernetes itself waits 50 s before it calls a silent node Unknown."""
NODE_MONITOR_PERIOD_S = 2
UNREACHABLE_TOLERATION_S = 5
"""Kubernetes itself leaves a pod on an unreachable node for 300 s.

The toleration of a node that is merely not ready stays at 300 s: that is what a node says while it shuts down and its
pods save.
"""

AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata"}],
}


def start(launcher: Launcher, binaries: Binaries, layout: Layout) -> None:
    """Start etcd and the API server, wait until they answer, and start controller manager and scheduler."""
    start_api(launcher, binaries, layout)
    for name, arguments in (
        ("kube-controller-manager", manager_arguments(layout)),
        ("kube-scheduler", ["kube-scheduler", *_client_arguments(layout, "kube-scheduler")]),
        ("kube-proxy", proxy_arguments(layout)),
    ):
        launcher.start(name, [binaries["kube"], *arguments])


def start_api(launcher: Launcher, binaries: Binaries, layout: Layout) -> None:
    """Start etcd and the API server, and wait until they answer."""
    (layout.folder / "audit-policy.yaml").write_text(json.dumps(AUDIT_POLICY), encoding="utf-8")
    kube = binaries["kube"]
    log = launcher.start("etcd", [kube, *etcd_arguments(layout)])
    wait_until(lambda: listens(str(layout.address), places.ETCD_PORT), "etcd", timeout_s=120, log=log)
    log = launcher.start("kube-apiserver", [kube, *api_server_arguments(layout)])
    wait_until(lambda: api_is_ready(layout), "the API server", timeout_s=200, log=log)


def api_is_ready(layout: Layout) -> bool:
    """Return True if the API server answers /readyz with 200."""
    trust = ssl.create_default_context(cafile=str(layout.certificates / "ca.crt"))
    trust.load_cert_chain(layout.certificates / "admin.crt", layout.certificates / "admin.key")
    try:
        with urllib.request.urlopen(f"{layout.api_url}/readyz", context=trust, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


def etcd_arguments(layout: Layout) -> list[str]:
    return [
        "etcd",
        f"--data-dir={layout.folder / 'etcd'}",
        f"--listen-client-url=http://{layout.address}:{places.ETCD_PORT}",
        f"--listen-peer-url=http://127.0.0.1:{places.ETCD_PEER_PORT}",
    ]


def api_server_arguments(layout: Layout) -> list[str]:
    folder = layout.certificates
    return [
        "kube-apiserver",
        f"--etcd-servers=http://{layout.address}:{places.ETCD_PORT}",
        f"--bind-address={layout.address}",
        f"--advertise-address={layout.address}",
        f"--secure-port={places.API_PORT}",
        f"--tls-cert-file={folder / 'kube-apiserver.crt'}",
        f"--tls-private-key-file={folder / 'kube-apiserver.key'}",
        f"--client-ca-file={folder / 'ca.crt'}",
        f"--kubelet-certificate-authority={folder / 'ca.crt'}",
        f"--kubelet-client-certificate={folder / 'kubelet-client.crt'}",
        f"--kubelet-client-key={folder / 'kubelet-client.key'}",
        "--kubelet-preferred-address-types=InternalIP",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={folder / 'service-accounts.key'}",
        f"--service-account-signing-key-file={folder / 'service-accounts.key'}",
        f"--service-cluster-ip-range={layout.service_network}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        # Nodes that join while the cluster runs come with a token.
        "--enable-bootstrap-token-auth=true",
        f"--default-unreachable-toleration-seconds={UNREACHABLE_TOLERATION_S}",
        "--allow-privileged=true",
        f"--audit-policy-file={layout.folder / 'audit-policy.yaml'}",
        f"--audit-log-path={layout.audit_log}",
        "--audit-log-maxsize=2000",
    ]


def manager_arguments(layout: Layout) -> list[str]:
    folder = layout.certificates
    return [
        "kube-controller-manager",
        *_client_arguments(layout, "kube-controller-manager"),
        f"--root-ca-file={folder / 'ca.crt'}",
        f"--service-account-private-key-file={folder / 'service-accounts.key'}",
        # Kubelets that come with a token are given a certificate.
        f"--cluster-signing-cert-file={folder / 'ca.crt'}",
        f"--cluster-signing-key-file={folder / 'ca.key'}",
        "--controllers=*,token-cleaner-controller",
        # Each controller has its own account and rights, as in a cluster that somebody runs.
        "--use-service-account-credentials=true",
        # Making these accounts at the default of 20 requests a second takes longer than all the rest of the start.
        "--kube-api-qps=200",
        "--kube-api-burst=400",
        f"--node-monitor-grace-period={NODE_MONITOR_GRACE_S}s",
        f"--node-monitor-period={NODE_MONITOR_PERIOD_S}s",
        f"--flex-volume-plugin-dir={layout.folder / 'volume-plugins'}",
    ]


def proxy_arguments(layout: Layout) -> list[str]:
    """Return the arguments of the one proxy for all nodes: they share the cluster's network namespace."""
    config = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": str(layout.certificates / "kube-proxy.kubeconfig")},
        "mode": "nftables",
        "clusterCIDR": str(layout.network),
        "hostnameOverride": "system",
        "healthzBindAddress": f"127.0.0.1:{places.PROXY_HEALTH_PORT}",
        "metricsBindAddress": f"127.0.0.1:{places.PROXY_METRICS_PORT}",
        # These would be written to settings of the machine.
        "conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        "nftables": {"syncPeriod": "30s", "minSyncPeriod": "100ms"},
    }
    path = layout.folder / "kube-proxy.yaml"
    path.write_text(json.dumps(config), encoding="utf-8")
    return ["kube-proxy", f"--config={path}"]


def _client_arguments(layout: Layout, user: str) -> list[str]:
    kubeconfig = layout.certificates / f"{user}.kubeconfig"
    return [
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        "--leader-elect=false",
        "--secure-port=0",
    ]
