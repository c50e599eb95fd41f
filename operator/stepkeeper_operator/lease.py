"""Let one operator act at a time: the holder of a Lease."""

import asyncio
import logging
import time
from datetime import UTC, datetime
from typing import Any

from stepkeeper_operator.cluster import LEASES, Cluster
from stepkeeper_operator.errors import AlreadyExistsError, ApiError, ConflictError, LeaseLostError
from stepkeeper_operator.facts.raw import RawObject

__all__ = ["LeaseGuard"]

_log = logging.getLogger(__name__)

_RENEWALS_PER_DURATION = 3


class LeaseGuard:
    """Acquire and renew the Lease. `held` says whether this process may write.

    Clocks of two operators are never compared: a waiting one measures on its own how long a foreign Lease
    stays unchanged.
    """

    def __init__(
        self, cluster: Cluster, *, namespace: str, name: str, identity: str, duration_s: int
    ) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._duration_s = duration_s
        self._renewed_at = float("-inf")
        self._lease: RawObject | None = None

    @property
    def held(self) -> bool:
        """True while no other operator can have taken over."""
        return time.monotonic() < self._renewed_at + self._duration_s

    async def acquire(self) -> None:
        """Acquire the Lease. Wait as long as another operator keeps renewing it."""
        seen, unchanged_since = None, time.monotonic()
        while True:
            try:
                lease = await self._cluster.get(LEASES, self._namespace, self._name)
                version = None if lease is None else lease["metadata"]["resourceVersion"]
                if version != seen:
                    seen, unchanged_since = version, time.monotonic()
                if _is_free(lease, self._identity) or time.monotonic() - unchanged_since > self._duration_s:
                    await self._write(lease)
                    _log.info("acquired lease", extra={"lease": self._name, "identity": self._identity})
                    return
                _log.info("waiting for lease", extra={"lease": self._name, "holder": _holder(lease)})
            except (ConflictError, AlreadyExistsError):
                continue  # another operator was faster: look again
            except ApiError as error:
                _log.warning("cannot ask for lease", extra={"lease": self._name, "error": str(error)})
            await asyncio.sleep(self._duration_s / _RENEWALS_PER_DURATION)

    async def keep_renewing(self) -> None:
        """Renew the Lease until cancelled.

        Raises:
            LeaseLostError: Another operator may act.
        """
        while True:
            await asyncio.sleep(self._duration_s / _RENEWALS_PER_DURATION)
            try:
                await self._renew()
            except ApiError as error:
                _log.warning("cannot renew lease", extra={"lease": self._name, "error": str(error)})
            if not self.held:
                raise LeaseLostError(
                    f"lease {self._namespace}/{self._name} could not be renewed for {self._duration_s} s; "
                    "this operator stops, another one may act"
                )

    async def release(self) -> None:
        """Give the Lease back, if it is held, so that the next operator need not wait."""
        if not self.held or self._lease is None:
            return
        self._renewed_at = float("-inf")
        try:
            await self._cluster.replace(LEASES, self._namespace, self._body(self._lease, holder=""))
        except ApiError as error:
            _log.warning("cannot give lease back", extra={"lease": self._name, "error": str(error)})

    async def _renew(self) -> None:
        try:
            await self._write(self._lease)
        except ConflictError:
            # Either an edit left us the holder, and the next renewal starts from it, or another operator took over.
            lease = await self._cluster.get(LEASES, self._namespace, self._name)
            if lease is not None and _holder(lease) not in {"", self._identity}:
                self._renewed_at = float("-inf")
                raise LeaseLostError(
                    f"lease {self._namespace}/{self._name} was taken by {_holder(lease)!r}"
                ) from None
            self._lease = lease

    async def _write(self, lease: RawObject | None) -> None:
        # Taken before the request: the renewal on the server can only be later than that.
        started = time.monotonic()
        body = self._body(lease, holder=self._identity)
        if lease is None:
            self._lease = await self._cluster.create(LEASES, self._namespace, body)
        else:
            self._lease = await self._cluster.replace(LEASES, self._namespace, body)
        self._renewed_at = started

    def _body(self, lease: RawObject | None, *, holder: str) -> dict[str, Any]:
        meta: dict[str, Any] = {"name": self._name, "namespace": self._namespace}
        if lease is not None:
            meta["resourceVersion"] = lease["metadata"]["resourceVersion"]
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        return {
            "apiVersion": LEASES.api_version,
            "kind": LEASES.kind,
            "metadata": meta,
            "spec": {
                "holderIdentity": holder,
                "leaseDurationSeconds": self._duration_s,
                "renewTime": now,
            },
        }


def _holder(lease: RawObject | None) -> str:
    return "" if lease is None else str(lease.get("spec", {}).get("holderIdentity") or "")


def _is_free(lease: RawObject | None, identity: str) -> bool:
    return _holder(lease) in {"", identity}
