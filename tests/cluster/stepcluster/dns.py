"""CoreDNS as a pod on the system node, with the rights that it has in any cluster."""

from collections.abc import Mapping

import yaml

from stepcluster.layout import Layout

IMAGE = "localhost/coredns:1"
NAMESPACE = "kube-system"
MANIFESTS = """
apiVersion: v1
kind: ServiceAccount
metadata: {name: coredns, namespace: kube-system}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: "system:coredns"}
rules:
- {apiGroups: [""], resources: [endpoints, services, pods, namespaces], verbs: [list, watch]}
- {apiGroups: [discovery.k8s.io], resources: [endpointslices], verbs: [list, watch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: "system:coredns"}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: "system:coredns"}
subjects: [{kind: ServiceAccount, name: coredns, namespace: kube-system}]
---
apiVersion: v1
kind: ConfigMap
metadata: {name: coredns, namespace: kube-system}
data:
  Corefile: |
    .:53 {
      errors
      health :8080
      ready :8181
      kubernetes cluster.local in-addr.arpa ip6.arpa {
        pods insecure
      }
      cache 5
    }
---
apiVersion: v1
kind: Service
metadata: {name: kube-dns, namespace: kube-system}
spec:
  clusterIP: ADDRESS
  selector: {k8s-app: kube-dns}
  ports: [{name: dns-udp, port: 53, protocol: UDP}, {name: dns-tcp, port: 53, protocol: TCP}]
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: coredns, namespace: kube-system}
spec:
  replicas: 1
  selector: {matchLabels: {k8s-app: kube-dns}}
  template:
    metadata: {labels: {k8s-app: kube-dns}}
    spec:
      serviceAccountName: coredns
      dnsPolicy: Default
      nodeSelector: {kubernetes.io/hostname: system}
      priorityClassName: system-cluster-critical
      volumes: [{name: config, configMap: {name: coredns}}]
      containers:
      - name: coredns
        image: localhost/coredns:1
        imagePullPolicy: Never
        args: ["-conf", /etc/coredns/Corefile]
        volumeMounts: [{name: config, mountPath: /etc/coredns, readOnly: true}]
        readinessProbe: {httpGet: {port: 8181, path: /ready}, periodSeconds: 1}
        livenessProbe: {httpGet: {port: 8080, path: /health}}
        securityContext: {readOnlyRootFilesystem: true, allowPrivilegeEscalation: false}
"""


def manifests(layout: Layout) -> list[Mapping[str, object]]:
    return list(yaml.safe_load_all(MANIFESTS.replace("ADDRESS", str(layout.dns_service_address))))
