"""CoreDNS as a pod on the system node, with the rights that it has in any cluster."""

from collections.abc import Mapping

from stepcluster.layout import Layout

IMAGE = "localhost/coredns:1"
NAMESPACE = "kube-system"
LABELS = {"k8s-app": "kube-dns"}
COREFILE = """\
.:53 {
  errors
  health :8080
  ready :8181
  kubernetes cluster.local in-addr.arpa ip6.arpa {
    pods insecure
  }
  cache 5
}
"""


def manifests(layout: Layout) -> list[Mapping[str, object]]:
    """Return the manifests to apply."""
    return [
        _account(),
        _role(),
        _role_binding(),
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "coredns", "namespace": NAMESPACE},
            "data": {"Corefile": COREFILE},
        },
        _service(layout),
        _deployment(),
    ]


def _account() -> Mapping[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": "coredns", "namespace": NAMESPACE},
    }


def _role() -> Mapping[str, object]:
    reads = ["list", "watch"]
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": "system:coredns"},
        "rules": [
            {"apiGroups": [""], "resources": ["endpoints", "services", "pods", "namespaces"], "verbs": reads},
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": reads},
        ],
    }


def _role_binding() -> Mapping[str, object]:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": "system:coredns"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:coredns"},
        "subjects": [{"kind": "ServiceAccount", "name": "coredns", "namespace": NAMESPACE}],
    }


def _service(layout: Layout) -> Mapping[str, object]:
    ports = [
        {"name": f"dns-{protocol.lower()}", "port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")
    ]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "kube-dns", "namespace": NAMESPACE},
        "spec": {"clusterIP": str(layout.dns_service_address), "selector": LABELS, "ports": ports},
    }


def _deployment() -> Mapping[str, object]:
    container = {
        "name": "coredns",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "args": ["-conf", "/etc/coredns/Corefile"],
        "volumeMounts": [{"name": "config", "mountPath": "/etc/coredns", "readOnly": True}],
        "readinessProbe": {"httpGet": {"port": 8181, "path": "/ready"}, "periodSeconds": 1},
        "livenessProbe": {"httpGet": {"port": 8080, "path": "/health"}},
        "securityContext": {"readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False},
    }
    pod = {
        "serviceAccountName": "coredns",
        "dnsPolicy": "Default",
        "nodeSelector": {"kubernetes.io/hostname": "system"},
        "priorityClassName": "system-cluster-critical",
        "volumes": [{"name": "config", "configMap": {"name": "coredns"}}],
        "containers": [container],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "coredns", "namespace": NAMESPACE},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": LABELS},
            "template": {"metadata": {"labels": LABELS}, "spec": pod},
        },
    }
