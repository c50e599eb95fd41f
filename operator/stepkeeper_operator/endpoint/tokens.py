"""Find the pod that a bearer token belongs to, with a TokenReview of the API server."""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from stepkeeper_operator.cluster import TOKEN_REVIEWS, Cluster

__all__ = ["KubernetesTokens", "TokenPod", "TokenVerifier"]

_SERVICE_ACCOUNT = "system:serviceaccount:"
_POD_NAME = "authentication.kubernetes.io/pod-name"
_POD_UID = "authentication.kubernetes.io/pod-uid"
_MAX_CACHED = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPod:
    """The pod that a token is bound to."""

    namespace: str
    name: str
    uid: str


class TokenVerifier(Protocol):
    async def verify(self, token: str, audience: str) -> TokenPod | None:
        """Return the pod that the token is bound to.

        Return None for a token that is bad, of another audience or of no pod.
        """


class KubernetesTokens:
    """Verify tokens with a TokenReview. A good answer is believed for a short while."""

    def __init__(
        self, cluster: Cluster, *, cached_s: float = 30.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cluster = cluster
        self._cached_s = cached_s
        self._clock = clock
        self._cache: dict[bytes, tuple[float, TokenPod]] = {}

    async def verify(self, token: str, audience: str) -> TokenPod | None:
        digest = hashlib.sha256(f"{audience}\n{token}".encode()).digest()
        until, pod = self._cache.get(digest, (0.0, None))
        if pod is not None and self._clock() < until:
            return pod
        pod = await self._review(token, audience)
        if pod is not None:
            if len(self._cache) >= _MAX_CACHED:
                self._drop_expired()
            self._cache[digest] = (self._clock() + self._cached_s, pod)
        return pod

    async def _review(self, token: str, audience: str) -> TokenPod | None:
        body = {
            "apiVersion": TOKEN_REVIEWS.api_version,
            "kind": TOKEN_REVIEWS.kind,
            "spec": {"token": token, "audiences": [audience]},
        }
        status = (await self._cluster.create(TOKEN_REVIEWS, None, body)).get("status", {})
        if not status.get("authenticated") or audience not in (status.get("audiences") or ()):
            return None
        user = status.get("user", {})
        extra = user.get("extra") or {}
        username = user.get("username", "")
        if not username.startswith(_SERVICE_ACCOUNT) or not extra.get(_POD_NAME) or not extra.get(_POD_UID):
            return None
        namespace = username.removeprefix(_SERVICE_ACCOUNT).partition(":")[0]
        return TokenPod(namespace=namespace, name=extra[_POD_NAME][0], uid=extra[_POD_UID][0])

    def _drop_expired(self) -> None:
        now = self._clock()
        self._cache = {digest: entry for digest, entry in self._cache.items() if entry[0] > now}
        if len(self._cache) >= _MAX_CACHED:
            self._cache.clear()
