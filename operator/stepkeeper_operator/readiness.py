"""Wait for everything that the operator needs at its start, and report what it waits for."""

import asyncio
import logging
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final

from stepkeeper_operator.cache.kinds import WatchedKind
from stepkeeper_operator.cluster.protocol import Cluster
from stepkeeper_operator.cluster.resources import TRAINING_JOBS, WORKLOADS
from stepkeeper_operator.endpoint.tls import ServingCertificate
from stepkeeper_operator.errors import ApiError, CertificateError
from stepkeeper_operator.lease import LeaseGuard

__all__ = ["Readiness", "find_readable", "is_kueue_installed"]

_log = logging.getLogger(__name__)

_CHECK_S: Final = 5.0


@dataclass(slots=True, kw_only=True)
class Readiness:
    """Wait for the CRDs, the Lease and a certificate, in this order, then keep the Lease."""

    cluster: Cluster
    kinds: tuple[WatchedKind, ...]
    lease: LeaseGuard
    certificate: ServingCertificate
    _renewing: asyncio.Task[None] | None = field(default=None, init=False)
    _waits_for: str = field(default="", init=False)

    @property
    def waits_for(self) -> str:
        """Description of the obstacle to the operator's start; empty if there is none."""
        return self.lease.waits_for or self._waits_for

    async def get_ready(self) -> None:
        """Wait until the operator may work. Raises LeaseLostError."""
        await self._wait_for_crds()
        await self.lease.acquire()
        self._renewing = asyncio.create_task(self.lease.keep_renewing())
        certificate = asyncio.create_task(self._wait_for_certificate())
        try:
            done, _ = await asyncio.wait({self._renewing, certificate}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            certificate.cancel()
            await asyncio.gather(certificate, return_exceptions=True)

    async def wait_until_lost(self) -> None:
        """Wait until the Lease is lost. Raises LeaseLostError."""
        assert self._renewing is not None  # set by get_ready
        await asyncio.shield(self._renewing)

    async def give_up(self) -> None:
        """End the renewals, and release the Lease."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
        await self.lease.release()

    async def _wait_for_crds(self) -> None:
        """Wait until the API server knows the kinds: kopf doesn't watch a kind that is installed later."""
        for kind in (kind for kind in self.kinds if kind.custom):
            while True:
                try:
                    await self.cluster.list_uids(kind.resource, kind.label_selector)
                    break
                except ApiError as error:
                    extra = {"kind": kind.resource.kind, "error": str(error)}
                    _log.warning("cannot list kind; is its CRD installed?", extra=extra)
                    self._waits_for = f"cannot list kind {kind.resource.kind}; is its CRD installed? {error}"
                    await asyncio.sleep(_CHECK_S)
        self._waits_for = ""

    async def _wait_for_certificate(self) -> None:
        """Wait until there is a certificate to serve. Jobs' ConfigMaps need its CA."""
        while True:
            try:
                await self.certificate.renew()
            except (ApiError, CertificateError) as error:
                if str(error) != self._waits_for:
                    _log.error("no certificate to serve", extra={"error": str(error)})
                self._waits_for = str(error)
            else:
                self._waits_for = ""
                return
            await asyncio.sleep(_CHECK_S)


async def find_readable(cluster: Cluster, namespaces: tuple[str, ...]) -> tuple[str, ...]:
    """Return those that the operator may read. One that is gone, with its Role, must not stop it in the others.

    Raises ApiError.
    """
    found = []
    for namespace in namespaces:
        try:
            await cluster.list_uids(TRAINING_JOBS, "", namespace=namespace)
            found.append(namespace)
        except ApiError as error:
            if error.status != HTTPStatus.FORBIDDEN:
                raise
            text = (
                "cannot watch namespace: create it, and upgrade the release, or take it from watchNamespaces"
            )
            _log.error(text, extra={"namespace": namespace, "error": str(error)})  # no bug: no traceback
    return tuple(found)


async def is_kueue_installed(cluster: Cluster) -> bool:
    """Return True if the API server knows Kueue's Workloads. If it can't be asked, log that and return False."""
    try:
        await cluster.list_uids(WORKLOADS, "")
    except ApiError as error:
        if error.status != HTTPStatus.NOT_FOUND:
            extra = {"kind": WORKLOADS.kind, "error": str(error)}
            _log.warning("cannot list kind; QuotaReserved stays unknown", extra=extra)
        return False
    return True
