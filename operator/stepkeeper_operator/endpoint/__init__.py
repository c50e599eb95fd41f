"""The HTTPS endpoint that pods report to."""

from stepkeeper_operator.endpoint.app import make_app
from stepkeeper_operator.endpoint.authentication import Authority, Reporter
from stepkeeper_operator.endpoint.tokens import KubernetesTokens, TokenPod, TokenVerifier

__all__ = ["Authority", "KubernetesTokens", "Reporter", "TokenPod", "TokenVerifier", "make_app"]
