"""Where things are in the pod."""

from typing import Final

__all__ = [
    "CA_FILE_NAME",
    "CONTAINER_NAME",
    "LOCAL_TIER_FOLDER",
    "NOTICE_FILE",
    "RUN_FOLDER",
    "SETTINGS_FILE_NAME",
    "SETTINGS_FOLDER",
    "TERMINATION_FILE",
    "TOKEN_FILE",
    "token_audience",
]

CONTAINER_NAME: Final = "trainer"
"""The one container of the template that trains."""

SETTINGS_FOLDER: Final = "/etc/stepkeeper"
"""Mount of the job's ConfigMap; kept current by the kubelet."""

SETTINGS_FILE_NAME: Final = "settings.json"
CA_FILE_NAME: Final = "ca.crt"

RUN_FOLDER: Final = "/run/stepkeeper"
"""An emptyDir shared by what the operator adds and the trainer."""

NOTICE_FILE: Final = f"{RUN_FOLDER}/notice"
"""Its existence is a notice: save and stop. The preStop hook touches it (a shell as PID 1 forwards no SIGTERM)."""

TOKEN_FILE: Final = "/var/run/secrets/stepkeeper/token"  # noqa: S105  # a path, no secret
"""Projected service-account token for the endpoint."""

LOCAL_TIER_FOLDER: Final = "/var/cache/stepkeeper"
"""A volume that the template mounts here is the trainer's local tier. The operator adds none."""

TERMINATION_FILE: Final = "/dev/termination-log"
"""Kubernetes' default termination-message path."""


def token_audience(job_uid: str) -> str:
    """The audience of a token that may report for the job with this uid, and for no other."""
    return f"stepkeeper.dev/jobs/{job_uid}"
