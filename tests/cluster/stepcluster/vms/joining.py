"""What a cluster needs so that nodes can join it with a token: what `kubeadm init` and `kubeadm token create` make."""

import datetime as dt
import secrets
import string
from collections.abc import Mapping
from dataclasses import dataclass

from stepcluster import certificates
from stepcluster.layout import API_PORT
from stepcluster.parts import Parts

GROUP = "system:bootstrappers:kubeadm:default-node-token"
_CHARACTERS = string.ascii_lowercase + string.digits
_ROLES = {
    "kubeadm:kubelet-bootstrap": "system:node-bootstrapper",
    "kubeadm:node-autoapprove-bootstrap": "system:certificates.k8s.io:certificatesigningrequests:nodeclient",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinTerms:
    endpoint: str
    """Address of the API server, host:port."""
    ca_cert_hash: str
    token: str


def prepare(parts: Parts) -> JoinTerms:
    """Return a token with which machines can join for a day, and what else they need."""
    token_id, secret = _random(6), _random(16)
    manifests = [*(_binding(name, role) for name, role in _ROLES.items()), _token(token_id, secret)]
    parts.apply(manifests)
    authority = (parts.layout.certificates / "ca.crt").read_bytes()
    return JoinTerms(
        endpoint=f"{parts.layout.address}:{API_PORT}",
        ca_cert_hash=certificates.hash_public_key(authority),
        token=f"{token_id}.{secret}",
    )


def _random(length: int) -> str:
    return "".join(secrets.choice(_CHARACTERS) for _ in range(length))


def _binding(name: str, role: str) -> Mapping[str, object]:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": GROUP}],
    }


def _token(token_id: str, secret: str) -> Mapping[str, object]:
    ends = dt.datetime.now(tz=dt.UTC) + dt.timedelta(days=1)
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "bootstrap.kubernetes.io/token",
        "metadata": {"name": f"bootstrap-token-{token_id}", "namespace": "kube-system"},
        "stringData": {
            "token-id": token_id,
            "token-secret": secret,
            "expiration": ends.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "usage-bootstrap-authentication": "true",
            "usage-bootstrap-signing": "true",
            "auth-extra-groups": GROUP,
        },
    }
