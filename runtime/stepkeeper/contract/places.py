"""Define names and paths in the pod: container, ports, folders and files."""

from typing import Final

__all__ = [
    "ATTEMPT_FOLDER_VARIABLE",
    "CA_FILE_NAME",
    "CONTAINER_NAME",
    "COORDINATOR_PORT",
    "LAUNCHER_VARIABLE",
    "LOCAL_TIER_FOLDER",
    "NOTICE_FILE",
    "RUN_FOLDER",
    "SETTINGS_FILE_NAME",
    "SETTINGS_FOLDER",
    "SUPERVISOR_VARIABLE",
    "TERMINATION_FILE",
    "TOKEN_FILE",
    "TORCHRUN_VARIABLE",
    "token_audience",
]

CONTAINER_NAME: Final = "trainer"
"""Name of the template's training container."""

COORDINATOR_PORT: Final = 29500
"""The first pod's rendezvous port: torchrun's default, which network policies most often allow."""

SETTINGS_FOLDER: Final = "/etc/stepkeeper"
"""The mount path of the job's ConfigMap. The kubelet keeps it current."""

SETTINGS_FILE_NAME: Final = "settings.json"
CA_FILE_NAME: Final = "ca.crt"

RUN_FOLDER: Final = "/run/stepkeeper"
"""An emptyDir that the trainer shares with the containers that the operator adds."""

NOTICE_FILE: Final = f"{RUN_FOLDER}/notice"
"""A file whose existence is a notice to save and stop.

The preStop hook touches it (a shell as PID 1 forwards no SIGTERM).
"""

TOKEN_FILE: Final = "/var/run/secrets/stepkeeper/token"  # noqa: S105  # a path, no secret
"""The projected service-account token for the endpoint."""

LAUNCHER_VARIABLE: Final = "STEPKEEPER_LAUNCHER"
"""The variable with the folder of `python -m stepkeeper.launch` in which processes register that handle SIGTERM. The
launcher signals them before their own launcher.
"""

ATTEMPT_FOLDER_VARIABLE: Final = "STEPKEEPER_ATTEMPT_FOLDER"
"""The variable with the folder of an attempt of `stepkeeper run`, which has the files of a pod's folders."""

SUPERVISOR_VARIABLE: Final = "STEPKEEPER_SUPERVISOR"
"""The variable with the pid of `stepkeeper run`. The launcher that it starts stops the training if it ends."""

TORCHRUN_VARIABLE: Final = "TORCHELASTIC_RUN_ID"
"""A variable that torchrun sets in its processes, and that theirs inherit."""

LOCAL_TIER_FOLDER: Final = "/var/cache/stepkeeper"
"""A volume that the template mounts here is the trainer's local tier. The operator adds none."""

TERMINATION_FILE: Final = "/dev/termination-log"
"""Kubernetes' default path of the termination message."""


def token_audience(job_uid: str) -> str:
    """Return the audience of a token that may report for this job only, by its uid."""
    return f"stepkeeper.dev/jobs/{job_uid}"
