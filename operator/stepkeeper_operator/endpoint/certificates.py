"""Make the endpoint's own CA and serving certificate, and renew both in time."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

__all__ = ["KeyPair", "TlsMaterial", "make_tls", "needs_renewal", "renew_tls"]

_CA_NAME: Final = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "stepkeeper operator CA")])

_CA_LIFE: Final = timedelta(days=3650)
_SERVING_LIFE: Final = timedelta(days=90)
_RENEW_BEFORE: Final = timedelta(days=30)
_CLOCK_SKEW: Final = timedelta(hours=1)
"""Certificates are valid from that much earlier: a pod's clock may be slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    certificate_pem: bytes
    key_pem: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsMaterial:
    """The endpoint's certificate, and the CA that signed it, which pods trust."""

    ca: KeyPair
    serving: KeyPair


def make_tls(
    names: tuple[str, ...], *, ca: KeyPair | None = None, now: datetime | None = None
) -> TlsMaterial:
    """Make a serving certificate for these DNS names and addresses, signed by `ca` or by a new CA."""
    now = now or datetime.now(UTC)
    ca = ca or _make_ca(now)
    return TlsMaterial(ca=ca, serving=_make_serving(ca, names, now))


def renew_tls(tls: TlsMaterial, names: tuple[str, ...], *, now: datetime | None = None) -> TlsMaterial:
    """Return the certificates to use from now on: `tls` itself if none is due.

    A CA is replaced before it could expire within the life of a certificate. Pods that don't trust the new one yet
    report again once their ConfigMap has it.
    """
    now = now or datetime.now(UTC)
    if _load(tls.ca.certificate_pem).not_valid_after_utc - now < _SERVING_LIFE:
        return make_tls(names, now=now)
    return make_tls(names, ca=tls.ca, now=now) if needs_renewal(tls, names, now=now) else tls


def needs_renewal(tls: TlsMaterial, names: tuple[str, ...], *, now: datetime) -> bool:
    """Return True if the serving certificate expires soon or lacks one of the names."""
    certificate = _load(tls.serving.certificate_pem)
    listed = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    ends = certificate.not_valid_after_utc
    return ends - now < _RENEW_BEFORE or any(_san(name) not in listed for name in names)


def _make_ca(now: datetime) -> KeyPair:
    key = ec.generate_private_key(ec.SECP256R1())
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        _builder(_CA_NAME, _CA_NAME, key.public_key(), now, _CA_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return _pair(certificate, key)


def _make_serving(ca: KeyPair, names: tuple[str, ...], now: datetime) -> KeyPair:
    ca_certificate = _load(ca.certificate_pem)
    ca_key = serialization.load_pem_private_key(ca.key_pem, password=None)
    # _make_ca makes this kind only, and read_secret accepts no other.
    assert isinstance(ca_key, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "stepkeeper operator")])
    issuer_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    certificate = (
        _builder(subject, ca_certificate.subject, key.public_key(), now, _SERVING_LIFE)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([_san(name) for name in names]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(issuer_id, critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    return _pair(certificate, key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, life: timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + life)
    )


def _load(pem: bytes) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pem)


def _san(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pair(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> KeyPair:
    key_pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return KeyPair(certificate_pem=certificate.public_bytes(serialization.Encoding.PEM), key_pem=key_pem)
