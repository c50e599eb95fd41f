"""Renew the endpoint's certificate in time, and store it in a Secret, so that pods trust the next operator too.

Only a Secret that the operator has made is read.
"""

import asyncio
import base64
import logging
import ssl
from collections.abc import Mapping
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from stepkeeper_operator.cluster.protocol import Cluster
from stepkeeper_operator.cluster.resources import SECRETS
from stepkeeper_operator.endpoint.certificates import KeyPair, TlsMaterial, make_tls, renew_tls
from stepkeeper_operator.endpoint.serving import load_certificate, server_tls
from stepkeeper_operator.errors import ApiError, CertificateError
from stepkeeper_operator.facts.raw import RawObject

__all__ = ["ServingCertificate", "read_secret", "secret_manifest"]

_log = logging.getLogger(__name__)

_CHECK_S = 3600.0
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


class ServingCertificate:
    """Hold one certificate and the TLS context that serves it."""

    def __init__(self, cluster: Cluster, *, namespace: str, secret_name: str, names: tuple[str, ...]) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._secret_name = secret_name
        self._names = names
        self._tls: TlsMaterial | None = None
        self.context: ssl.SSLContext = server_tls()

    @property
    def ca_pem(self) -> str:
        """The CA that pods trust. Known after the first `renew`."""
        assert self._tls is not None  # set by the renewal at the start
        return self._tls.ca.certificate_pem.decode()

    async def renew(self) -> None:
        """Load the stored certificates, and replace those that expire soon. Without the Secret, the CA is new too.

        Raises ApiError, and CertificateError if the Secret isn't usable: the previous certificate stays in use then.
        """
        secret = await self._cluster.get(SECRETS, self._namespace, self._secret_name)
        known = None if secret is None else read_secret(secret)
        tls = make_tls(self._names) if known is None else renew_tls(known, self._names)
        if tls is not known:
            await self._store(tls, None if secret is None else secret["metadata"]["resourceVersion"])
            _log.info("made certificates", extra={"names": ",".join(self._names)})
        self._tls = tls
        load_certificate(self.context, tls.serving)

    async def keep_renewing(self) -> None:
        """Replace certificates that expire soon. Check every hour until cancelled, also after an error."""
        while True:
            await asyncio.sleep(_CHECK_S)
            try:
                await self.renew()
            except (ApiError, CertificateError) as error:
                _log.error("cannot renew certificate", extra={"error": str(error)})

    async def _store(self, tls: TlsMaterial, version: str | None) -> None:
        body = dict(secret_manifest(tls, namespace=self._namespace, name=self._secret_name))
        if version is None:
            await self._cluster.create(SECRETS, self._namespace, body)
        else:  # with its version: a Secret that was changed since the read isn't overwritten
            body["metadata"] = body["metadata"] | {"resourceVersion": version}
            await self._cluster.replace(SECRETS, self._namespace, body)


def read_secret(secret: RawObject) -> TlsMaterial:
    """Read the certificates. Raises CertificateError if the operator didn't make them, or they don't match."""
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
