"""The HTTPS endpoint that pods report to."""

from stepkeeper_operator.endpoint.app import ReportEndpoint
from stepkeeper_operator.endpoint.authentication import Authority, Reporter
from stepkeeper_operator.endpoint.tokens import KubernetesTokens, TokenPod, TokenVerifier

__all__ = ["Authority", "KubernetesTokens", "ReportEndpoint", "Reporter", "TokenPod", "TokenVerifier"]
