"""Name the places in the pod: containers, ports, folders and files."""

from typing import Final

__all__ = [
    "CA_FILE_NAME",
    "CONTAINER_NAME",
    "COORDINATOR_PORT",
    "LAUNCHER_VARIABLE",
    "LOCAL_TIER_FOLDER",
    "NOTICE_FILE",
    "RUN_FOLDER",
    "SETTINGS_FILE_NAME",
    "SETTINGS_FOLDER",
    "TERMINATION_FILE",
    "TOKEN_FILE",
    "TORCHRUN_VARIABLE",
    "token_audience",
]

CONTAINER_NAME: Final = "trainer"
"""The one container of the template that trains."""

COORDINATOR_PORT: Final = 29500
"""The port on which the first pod lets the others find it: torchrun's own default, open where any is."""

SETTINGS_FOLDER: Final = "/etc/stepkeeper"
"""The mount of the job's ConfigMap. The kubelet keeps it current."""

SETTINGS_FILE_NAME: Final = "settings.json"
CA_FILE_NAME: Final = "ca.crt"

RUN_FOLDER: Final = "/run/stepkeeper"
"""An emptyDir that the trainer shares with what the operator adds."""

NOTICE_FILE: Final = f"{RUN_FOLDER}/notice"
"""A file whose existence is a notice: save and stop.

The preStop hook touches it (a shell as PID 1 forwards no SIGTERM).
"""

TOKEN_FILE: Final = "/var/run/secrets/stepkeeper/token"  # noqa: S105  # a path, no secret
"""The projected service-account token for the endpoint."""

LAUNCHER_VARIABLE: Final = "STEPKEEPER_LAUNCHER"
"""Names the folder of `python -m stepkeeper.launch` in which the processes below it sign on that take SIGTERM. The
launcher sends it to them before it sends it to their own launcher.
"""

TORCHRUN_VARIABLE: Final = "TORCHELASTIC_RUN_ID"
"""Set by torchrun in each of its processes, which hand it on to theirs."""

LOCAL_TIER_FOLDER: Final = "/var/cache/stepkeeper"
"""A volume that the template mounts here is the trainer's local tier. The operator adds none."""

TERMINATION_FILE: Final = "/dev/termination-log"
"""Kubernetes' default path of the termination message."""


def token_audience(job_uid: str) -> str:
    """Return the audience of a token that may report for one job, and for no other.

    Args:
        job_uid: The uid of the CheckpointedTrainingJob.

    """
    return f"stepkeeper.dev/jobs/{job_uid}"
