"""Serve the HTTPS endpoint that pods report to."""

from stepkeeper_operator.endpoint.app import ReportEndpoint
from stepkeeper_operator.endpoint.authentication import ReportAuthenticator, ReportingAttempt
from stepkeeper_operator.endpoint.tokens import KubernetesTokens, TokenPod, TokenVerifier

__all__ = [
    "KubernetesTokens",
    "ReportAuthenticator",
    "ReportEndpoint",
    "ReportingAttempt",
    "TokenPod",
    "TokenVerifier",
]
