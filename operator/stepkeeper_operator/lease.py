"""Let one operator act at a time: the holder of a Lease."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from stepkeeper_operator.cluster.protocol import Cluster
from stepkeeper_operator.cluster.resources import LEASES
from stepkeeper_operator.errors import AlreadyExistsError, ApiError, ConflictError, LeaseLostError
from stepkeeper_operator.facts.raw import RawObject

__all__ = ["LeaseGuard"]

T = TypeVar("T")

_log = logging.getLogger(__name__)

_RENEWALS_PER_DURATION = 5
"""A Lease request may take as long as the pause between two renewals: two can fail before the Lease expires."""

_HELD_SHARE = 2 / 3
"""The share of the Lease's duration for which its holder acts after a renewal. The rest is for pending requests."""

_OPERATOR_LABEL = "stepkeeper.dev/operator"
_ACTING_ANNOTATION = "stepkeeper.dev/acting"
"""Marks the Lease of an operator that found no other one acting."""

_WATCHED_ANNOTATION = "stepkeeper.dev/watched-namespaces"
"""The namespaces that it watches, with commas in between. Without it, all."""


@dataclass(frozen=True, slots=True)
class _Rival:
    """Another installation's Lease with a live holder."""

    place: tuple[str, str]
    """Namespace and name."""

    holder: str
    acting: bool


class LeaseGuard:
    """Acquire and renew the Lease. `held` shows whether this process may write.

    The clocks of two operators are never compared: a waiting one measures by its own clock how long a foreign Lease
    stays unchanged.

    Two installations in one cluster have separate Leases, and would undo each other's work, unless their lists of
    watched namespaces have none in common. So each looks for other Leases before it acts, marks its own as acting, and
    looks again: of two that start at once, one sees the other.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        namespace: str,
        name: str,
        identity: str,
        duration_s: int,
        watched: Sequence[str] = (),
    ) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._duration_s = duration_s
        self._watched = watched
        self._renewed_at = float("-inf")
        self._lease: RawObject | None = None
        self._acting = False
        self._seen: dict[str, tuple[str, float]] = {}
        """Version of each other Lease, by uid, and when it was first seen by time.monotonic()."""

        self.waits_for = ""
        """Description of the operator that this one waits for; empty if there is none."""

    @property
    def held(self) -> bool:
        """True while no other operator can have taken over."""
        return time.monotonic() < self._renewed_at + self._duration_s * _HELD_SHARE

    async def acquire(self) -> None:
        """Acquire the Lease. Wait as long as another operator keeps renewing it, or another installation acts."""
        await self._acquire_own()
        while True:
            try:
                rival = await self._find_obstacle()
                if rival is None:
                    self.waits_for = ""
                    return
                self._report_rival(rival)
            except ApiError as error:
                self.waits_for = f"cannot list the Leases of other installations: {error}"
                _log.warning("cannot look for other operators", extra={"error": str(error)})
            await asyncio.sleep(self._pause_s)
            with contextlib.suppress(ApiError):  # the next renewal, or `keep_renewing`, notices a lost Lease
                await self._renew()

    async def _acquire_own(self) -> None:
        """Acquire the Lease of this installation once it has no holder, or hasn't changed for its duration."""
        seen, unchanged_since = None, time.monotonic()
        while True:
            try:
                lease = await self._ask(self._cluster.get(LEASES, self._namespace, self._name))
                version = None if lease is None else lease["metadata"]["resourceVersion"]
                if version != seen:
                    seen, unchanged_since = version, time.monotonic()
                expired = time.monotonic() - unchanged_since > self._duration_s
                if expired or _holder(lease) in {"", self._identity}:
                    await self._write(lease)
                    _log.info("acquired lease", extra={"lease": self._name, "identity": self._identity})
                    return
                self.waits_for = f"lease {self._namespace}/{self._name}, held by {_holder(lease)}"
                _log.info("waiting for lease", extra={"lease": self._name, "holder": _holder(lease)})
            except (ConflictError, AlreadyExistsError):
                continue  # another operator was faster: look again
            except ApiError as error:
                _log.warning("cannot acquire lease", extra={"lease": self._name, "error": str(error)})
            await asyncio.sleep(self._pause_s)

    async def keep_renewing(self) -> None:
        """Renew the Lease until cancelled. Raises LeaseLostError once another operator may act."""
        while True:
            await asyncio.sleep(self._pause_s)
            # A process that was frozen must stop as well: another operator may have taken over.
            self._check_held()
            try:
                await self._renew()
            except ApiError as error:
                _log.warning("cannot renew lease", extra={"lease": self._name, "error": str(error)})
            self._check_held()

    def _check_held(self) -> None:
        if not self.held:
            held_s = self._duration_s * _HELD_SHARE
            raise LeaseLostError(
                f"lease {self._namespace}/{self._name} could not be renewed for {held_s:.0f} s; this operator stops, "
                "because another one may act"
            )

    async def release(self) -> None:
        """Release the Lease if it is held, so that the next operator need not wait."""
        if not self.held or self._lease is None:
            return
        # From here on `held` is False: this operator writes nothing once another one can see the release.
        self._renewed_at, self._acting = float("-inf"), False
        try:
            body = self._body(self._lease, holder="")
            await self._ask(self._cluster.replace(LEASES, self._namespace, body))
        except ApiError as error:
            _log.warning("cannot release lease", extra={"lease": self._name, "error": str(error)})

    @property
    def _pause_s(self) -> float:
        return self._duration_s / _RENEWALS_PER_DURATION

    async def _ask(self, request: Awaitable[T]) -> T:
        """Await the request with a limit shorter than the Lease's duration. Raises ApiError."""
        try:
            async with asyncio.timeout(self._pause_s):
                return await request
        except TimeoutError as error:
            raise ApiError(0, f"no answer about lease {self._name} within {self._pause_s:.1f} s") from error

    async def _find_obstacle(self) -> _Rival | None:
        """Find another installation that acts, or whose place comes before this one's. If none, mark this as acting."""
        own_place = (self._namespace, self._name)
        for rival in await self._list_rivals():
            if rival.acting or rival.place < own_place:
                return rival
        self._acting = True
        await self._write(self._lease)
        other = next((rival for rival in await self._list_rivals() if rival.acting), None)
        if other is not None:  # it marked itself at the same time: both withdraw, and look again
            self._acting = False
            await self._write(self._lease)
        return other

    async def _list_rivals(self) -> list[_Rival]:
        """List the other installations whose Lease has a holder that renews it."""
        found, now = [], time.monotonic()
        for lease in await self._ask(self._cluster.list_all(LEASES, f"{_OPERATOR_LABEL}=true")):
            meta, spec = lease["metadata"], lease.get("spec", {})
            place, version = (meta["namespace"], meta["name"]), str(meta["resourceVersion"])
            if place == (self._namespace, self._name) or not _holder(lease) or self._is_apart(lease):
                continue
            seen, unchanged_since = self._seen.get(meta["uid"], ("", now))
            if seen != version:
                unchanged_since = now
            self._seen[meta["uid"]] = (version, unchanged_since)
            if now - unchanged_since > spec.get("leaseDurationSeconds", self._duration_s):
                continue  # its holder is dead
            acting = (meta.get("annotations") or {}).get(_ACTING_ANNOTATION) == "true"
            found.append(_Rival(place, _holder(lease), acting))
        return sorted(found, key=lambda rival: rival.place)

    def _is_apart(self, lease: RawObject) -> bool:
        """Return True if the other installation and this one watch listed namespaces, and none of both."""
        theirs = (lease["metadata"].get("annotations") or {}).get(_WATCHED_ANNOTATION, "")
        return bool(theirs and self._watched) and not set(theirs.split(",")) & set(self._watched)

    def _report_rival(self, rival: _Rival) -> None:
        text = (
            f"operator {rival.holder} with lease {'/'.join(rival.place)} is already in this cluster. Two operators "
            "would undo each other's work, so this one does nothing: uninstall one of them (helm list -A)"
        )
        if text != self.waits_for:
            _log.error(text, extra={"lease": self._name})
        self.waits_for = text

    async def _renew(self) -> None:
        try:
            await self._write(self._lease)
        except ConflictError:
            # Either somebody edited the Lease without taking it over, and the next renewal uses the new version, or
            # another operator took over.
            lease = await self._ask(self._cluster.get(LEASES, self._namespace, self._name))
            if lease is not None and _holder(lease) not in {"", self._identity}:
                self._renewed_at = float("-inf")
                raise LeaseLostError(
                    f"lease {self._namespace}/{self._name} was taken over by {_holder(lease)!r}"
                ) from None
            self._lease = lease

    async def _write(self, lease: RawObject | None) -> None:
        # Read the clock before the request: the renewal on the server can only be later.
        started = time.monotonic()
        write = self._cluster.create if lease is None else self._cluster.replace
        body = self._body(lease, holder=self._identity)
        self._lease = await self._ask(write(LEASES, self._namespace, body))
        self._renewed_at = started

    def _body(self, lease: RawObject | None, *, holder: str) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "name": self._name,
            "namespace": self._namespace,
            "labels": {_OPERATOR_LABEL: "true"},
            "annotations": {
                **({_WATCHED_ANNOTATION: ",".join(self._watched)} if self._watched else {}),
                **({_ACTING_ANNOTATION: "true"} if self._acting else {}),
            },
        }
        if lease is not None:
            meta["resourceVersion"] = lease["metadata"]["resourceVersion"]
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        return {
            "apiVersion": LEASES.api_version,
            "kind": LEASES.kind,
            "metadata": meta,
            "spec": {"holderIdentity": holder, "leaseDurationSeconds": self._duration_s, "renewTime": now},
        }


def _holder(lease: RawObject | None) -> str:
    return "" if lease is None else str(lease.get("spec", {}).get("holderIdentity") or "")
