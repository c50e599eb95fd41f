"""Store the endpoint's certificates in a Secret, and read only a Secret that the operator has made."""

import base64
from collections.abc import Mapping
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from stepkeeper_operator.endpoint.certificates import KeyPair, TlsMaterial
from stepkeeper_operator.errors import CertificateError
from stepkeeper_operator.facts.raw import RawObject

__all__ = ["read_secret", "secret_manifest"]

_MADE_BY: Final = {"app.kubernetes.io/managed-by": "stepkeeper-operator"}
_CA_CERT, _CA_KEY, _CERT, _KEY = "ca.crt", "ca.key", "tls.crt", "tls.key"
_NOT_OURS: Final = (
    "was not made by this operator, and is left unchanged. Delete it, or recreate it under another name for its users: "
    "the operator then makes its own"
)
_ADVICE: Final = (
    "Nothing was changed. Restore the Secret, or delete it: the operator then makes a new CA, and accepts reports "
    "again once the pods' ConfigMaps have it, within minutes"
)


def read_secret(secret: RawObject) -> TlsMaterial:
    """Read the certificates from the Secret.

    Raises:
        CertificateError: The operator didn't make it, a part is missing, or the parts don't match.

    """
    meta, data = secret["metadata"], secret.get("data") or {}
    where = f"Secret {meta['namespace']}/{meta['name']}"
    if not (meta.get("labels") or {}).items() >= _MADE_BY.items():
        raise CertificateError(f"{where} {_NOT_OURS}")
    try:
        tls = TlsMaterial(ca=_read_pair(data, _CA_CERT, _CA_KEY), serving=_read_pair(data, _CERT, _KEY))
        serving = x509.load_pem_x509_certificate(tls.serving.certificate_pem)
        serving.verify_directly_issued_by(x509.load_pem_x509_certificate(tls.ca.certificate_pem))
        return tls
    except (KeyError, ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm) as error:
        raise CertificateError(f"{where} is damaged ({error!r}). {_ADVICE}") from error


def secret_manifest(tls: TlsMaterial, *, namespace: str, name: str) -> RawObject:
    """Build the Secret that `read_secret` reads."""
    parts = {
        _CA_CERT: tls.ca.certificate_pem,
        _CA_KEY: tls.ca.key_pem,
        _CERT: tls.serving.certificate_pem,
        _KEY: tls.serving.key_pem,
    }
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": namespace, "labels": dict(_MADE_BY)},
        "type": "kubernetes.io/tls",
        "data": {key: base64.b64encode(data).decode() for key, data in parts.items()},
    }


def _read_pair(data: Mapping[str, str], certificate_key: str, private_key: str) -> KeyPair:
    """Read a certificate and its key. Raises KeyError, ValueError, TypeError or UnsupportedAlgorithm."""
    pair = KeyPair(
        certificate_pem=base64.b64decode(data[certificate_key]), key_pem=base64.b64decode(data[private_key])
    )
    key = serialization.load_pem_private_key(pair.key_pem, password=None)
    certificate = x509.load_pem_x509_certificate(pair.certificate_pem)
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise ValueError(f"{private_key} isn't the key of {certificate_key}")
    return pair
