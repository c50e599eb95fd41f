"""The cluster's certificate authority, its certificates and the kubeconfigs made of them."""

import base64
import datetime as dt
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, ip_address
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from stepcluster.layout import Layout

LIFETIME_DAYS = 365
MASTERS = "system:masters"


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    """Signs the certificates of one cluster into one folder."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate
    folder: Path

    @property
    def path(self) -> Path:
        """The authority's own certificate."""
        return self.folder / "ca.crt"

    def issue(
        self, file_name: str, common_name: str, *, organisation: str = "", hosts: Sequence[str] = ()
    ) -> None:
        """Write `<file_name>.crt` and `.key` to the folder, good for clients and, with hosts, for servers."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
        if organisation:
            names.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, organisation))
        builder = _builder(x509.Name(names), self.certificate.subject, key.public_key()).add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]),
            critical=False,
        )
        if hosts:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_general_name(host) for host in hosts]), critical=False
            )
        certificate = builder.sign(self.key, hashes.SHA256())
        (self.folder / f"{file_name}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        _write_key(self.folder / f"{file_name}.key", key)


def create_authority(folder: Path, cluster: str) -> Authority:
    """Create an authority, and write its certificate, its key and one for service account tokens to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"stepkeeper-{cluster}")])
    certificate = (
        _builder(name, name, key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    authority = Authority(key=key, certificate=certificate, folder=folder)
    authority.path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    _write_key(folder / "ca.key", key)
    _write_key(folder / "service-accounts.key", ec.generate_private_key(ec.SECP256R1()))
    return authority


def load_authority(folder: Path) -> Authority:
    key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    certificate = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    return Authority(key=key, certificate=certificate, folder=folder)


def hash_public_key(certificate: bytes) -> str:
    """Hash the public key of a certificate, in PEM, as kubeadm's discovery-token-ca-cert-hash does."""
    key = x509.load_pem_x509_certificate(certificate).public_key()
    spki = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return f"sha256:{hashlib.sha256(spki).hexdigest()}"


def issue_serving(authority: Authority, layout: Layout, node: str) -> None:
    """Write the certificate by which the node's kubelet serves."""
    authority.issue(f"kubelet-{node}", node, hosts=[node, str(layout.address)])


def issue_all(authority: Authority, layout: Layout, nodes: Sequence[str]) -> None:
    """Write every certificate of the cluster to the authority's folder, and the kubeconfigs beside them."""
    servers = [str(layout.address), str(layout.api_service_address), "localhost", "127.0.0.1"]
    services = ["kubernetes", "kubernetes.default", "kubernetes.default.svc"]
    authority.issue("kube-apiserver", "kube-apiserver", hosts=[*services, *servers])
    authority.issue("kubelet-client", "kube-apiserver-kubelet-client", organisation=MASTERS)
    authority.issue("jobset-webhook", "jobset-webhook", hosts=servers)
    clients = {
        "admin": ("kubernetes-admin", MASTERS),
        "jobset": ("jobset-controller", MASTERS),
        "kube-controller-manager": ("system:kube-controller-manager", ""),
        "kube-scheduler": ("system:kube-scheduler", ""),
        "kube-proxy": ("system:kube-proxy", ""),
        **{node: (f"system:node:{node}", "system:nodes") for node in nodes},
    }
    for file_name, (common_name, organisation) in clients.items():
        authority.issue(file_name, common_name, organisation=organisation)
        kubeconfig = authority.folder / f"{file_name}.kubeconfig"
        kubeconfig.write_text(write_kubeconfig(layout, authority.folder, file_name), encoding="utf-8")
    for node in nodes:
        issue_serving(authority, layout, node)
    layout.kubeconfig.write_bytes((authority.folder / "admin.kubeconfig").read_bytes())
    layout.kubeconfig.chmod(0o600)


def write_kubeconfig(layout: Layout, folder: Path, user: str) -> str:
    """Return the text of a kubeconfig with everything in it, so that it works wherever it is copied to."""

    def embedded(file_name: str) -> str:
        return base64.b64encode((folder / file_name).read_bytes()).decode()

    cluster = {"server": layout.api_url, "certificate-authority-data": embedded("ca.crt")}
    credentials = {
        "client-certificate-data": embedded(f"{user}.crt"),
        "client-key-data": embedded(f"{user}.key"),
    }
    name = f"stepkeeper-{layout.name}"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": name, "cluster": cluster}],
        "users": [{"name": user, "user": credentials}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": user}}],
        "current-context": name,
    }
    return yaml.safe_dump(config)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = dt.datetime.now(tz=dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(minutes=5))
        .not_valid_after(now + dt.timedelta(days=LIFETIME_DAYS))
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        address = ip_address(host)
    except ValueError:
        return x509.DNSName(host)
    return x509.IPAddress(IPv4Address(address))


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
    )
