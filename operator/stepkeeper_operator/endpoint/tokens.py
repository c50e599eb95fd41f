"""Find the pod that a bearer token belongs to, with a TokenReview of the API server."""

import base64
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from stepkeeper_operator.cluster.protocol import Cluster
from stepkeeper_operator.cluster.resources import TOKEN_REVIEWS

__all__ = ["KubernetesTokens", "TokenPod", "TokenVerifier"]

_SERVICE_ACCOUNT = "system:serviceaccount:"
_POD_NAME = "authentication.kubernetes.io/pod-name"
_POD_UID = "authentication.kubernetes.io/pod-uid"
_MAX_CACHED = 4096
_ACCEPTED_S = 30.0
"""Seconds for which an accepted token needs no other review."""

_REFUSED_S = 10.0
"""Seconds for which a rejected token is rejected without another review."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPod:
    """The pod that a token is bound to."""

    namespace: str
    name: str
    uid: str


class TokenVerifier(Protocol):
    def claims(self, token: str, audience: str) -> bool:
        """Return whether the token claims to be for the audience, without a review."""

    async def verify(self, token: str, audience: str) -> TokenPod | None:
        """Return the pod that the token is bound to; None if it is invalid, for another audience, or for no pod."""


class KubernetesTokens:
    """Verify tokens with a TokenReview, and cache the answers for a short time.

    Only a token that claims to be for the audience is reviewed: anyone can send any number of others.
    """

    def __init__(self, cluster: Cluster, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._clock = clock
        self._cache: dict[bytes, tuple[float, TokenPod | None]] = {}

    def claims(self, token: str, audience: str) -> bool:
        # A JWT is header.payload.signature, in base64 without padding. The API server checks the signature.
        _, _, rest = token.partition(".")
        payload, _, signature = rest.partition(".")
        padding = "=" * (-len(payload) % 4)
        try:
            audiences = json.loads(base64.urlsafe_b64decode(payload + padding))["aud"]
        except (ValueError, KeyError, TypeError, RecursionError):  # anyone can send anything
            return False
        return bool(signature) and audience in (audiences if isinstance(audiences, list) else [audiences])

    async def verify(self, token: str, audience: str) -> TokenPod | None:
        if not self.claims(token, audience):
            return None
        digest = hashlib.sha256(f"{audience}\n{token}".encode()).digest()
        until, pod = self._cache.get(digest, (float("-inf"), None))
        if self._clock() < until:
            return pod
        pod = await self._review(token, audience)
        if len(self._cache) >= _MAX_CACHED:
            self._cache.clear()  # live tokens are reviewed again
        kept_s = _REFUSED_S if pod is None else _ACCEPTED_S
        self._cache[digest] = (self._clock() + kept_s, pod)
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
