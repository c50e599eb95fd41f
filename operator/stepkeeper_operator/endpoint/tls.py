"""Renew the endpoint's certificate in time, and store it in a Secret, so that pods trust the next operator too."""

import asyncio
import logging
import ssl

from stepkeeper_operator.cluster.protocol import Cluster
from stepkeeper_operator.cluster.resources import SECRETS
from stepkeeper_operator.endpoint.certificates import TlsMaterial, make_tls, renew_tls
from stepkeeper_operator.endpoint.serving import load_certificate, server_tls
from stepkeeper_operator.endpoint.tls_secret import read_secret, secret_manifest
from stepkeeper_operator.errors import ApiError, CertificateError

__all__ = ["ServingCertificate"]

_log = logging.getLogger(__name__)

_CHECK_S = 3600.0


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
        """Load the stored certificates, and replace those that expire soon.

        Without the Secret, the CA is new too.

        Raises:
            ApiError: The API server rejected a request.
            CertificateError: The Secret is damaged, or not the operator's own. The previous certificate stays in use.

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
        """Renew in time until cancelled.

        A failed renewal is retried every hour; the certificate is still valid for a month then.
        """
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
        else:
            body["metadata"] = body["metadata"] | {"resourceVersion": version}
            await self._cluster.replace(SECRETS, self._namespace, body)
