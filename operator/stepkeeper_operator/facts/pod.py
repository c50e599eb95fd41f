"""Read the few fields of a pod that decisions need: a thousand jobs of sixteen pods have to fit in memory."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from stepkeeper.contract import CONTAINER_NAME, ContractError, ExitCode, Termination
from stepkeeper_operator.facts.raw import RawObject, condition_of, controller_of, ordinal_of, parse_time
from stepkeeper_operator.labels import COMPLETION_INDEX_LABEL, HANG_CONDITION, JOB_INDEX_LABEL, JOB_UID_LABEL

__all__ = ["ContainerEnd", "Pod", "read_pod", "summarize_log"]

_MESSAGE_LIMIT: Final = 300
_DELETING_DISRUPTIONS: Final = {"EvictionByEvictionAPI", "PreemptionByScheduler"}
"""Reasons of disruptions that delete the pod themselves. Others are reported when a lost machine is noticed."""

_CLOCK_SKEW_S: Final = 1  # between the API server and the controller that reports the disruption
_LOG_LIMIT: Final = 500
"""Characters that are kept of a log."""

_N_LOG_LINES: Final = 3
_ENDING_PROBES: Final = {"livenessProbe", "startupProbe"}
_RANK: Final = re.compile(r"^(\[[A-Za-z]*\d+\]:\s?)+")
"""The prefix that torch and torchrun put before each line of a rank."""

_TRACEBACK: Final = "Traceback (most recent call last):"
_LAUNCHER: Final = "ChildFailedError"
"""The error that torchrun raises when one of its processes has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerEnd:
    """The end of a container other than the trainer."""

    name: str
    code: int
    reason: str | None
    finished_at: float | None
    log_tail: str = ""
    """The end of its message or log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """The fields of a pod that decisions need: identity, phase, deletion, and the ends of its containers."""

    namespace: str
    name: str
    uid: str
    job_uid: str
    """Uid of the CheckpointedTrainingJob, from the label."""

    owner_uid: str | None
    """Uid of the batch Job that controls it."""

    owner_name: str | None = None
    """Name of that Job."""

    ordinal: tuple[int, int] | None
    """The attempt that its labels name; see `ordinal_of`."""

    rank: tuple[int, int]
    """Index of the slice, and of the host within the slice."""

    created_at: float
    node: str | None
    phase: str
    reason: str | None
    """status.reason: Evicted, NodeShutdown, …"""

    message: str | None = None
    """status.message: the reason in detail, for people."""

    started: bool
    """True if the trainer container runs or ran."""

    deadline: float | None
    """Unix time when its deletion is due: deletionTimestamp, which includes the grace period."""

    grace_s: int
    """Grace period: of its deletion once that is requested, before that of its template."""

    disruption: str | None
    """Reason of a true DisruptionTarget condition."""

    hang: bool
    exit_code: int | None
    exit_reason: str | None
    """The kubelet's reason for the container's end, e.g. OOMKilled."""

    finished_at: float | None
    termination: Termination | None
    log_tail: str = ""
    """The end of the trainer's message or log, if that is not a termination message of the runtime."""

    other_failure: ContainerEnd | None = None
    """The first init container or sidecar that exited with a code other than 0."""

    others_running: tuple[str, ...] = ()
    """Names of the other containers that still run. The pod ends when all of them have ended."""

    waiting: str | None
    """Why it doesn't start, for people."""

    probed: bool = False
    """True if a container has a probe whose failure ends it."""

    failed_probe: str = ""
    """The container and the probe that failed, in the words of the kubelet's event. The pod's object lacks them."""

    @property
    def terminal(self) -> bool:
        return self.phase in {"Failed", "Succeeded"}

    @property
    def deletion_requested_at(self) -> float | None:
        """Unix time of the request for its deletion; None if there was none."""
        return None if self.deadline is None else self.deadline - self.grace_s

    @property
    def code(self) -> int | None:
        """The exit code that the process intended. A launcher or shell can end with another one.

        So the code in the termination message counts, except DONE: an export after the training can still fail.
        """
        if self.termination is None:
            return self.exit_code
        is_done = self.termination.code == ExitCode.DONE
        return self.exit_code if is_done and self.exit_code is not None else self.termination.code


def read_pod(raw: RawObject) -> Pod:
    """Read the facts of a pod object."""
    meta, spec, status = raw["metadata"], raw.get("spec", {}), raw.get("status", {})
    labels = meta.get("labels") or {}
    trainer = _trainer_status(status)
    ended = trainer.get("state", {}).get("terminated") or {}
    termination = _termination(ended.get("message"))
    owner = controller_of(raw)
    deleted_grace = meta.get("deletionGracePeriodSeconds")
    return Pod(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        job_uid=labels.get(JOB_UID_LABEL, ""),
        owner_uid=None if owner is None else str(owner["uid"]),
        owner_name=None if owner is None else owner.get("name"),
        ordinal=ordinal_of(raw),
        rank=(_number(labels.get(JOB_INDEX_LABEL)), _number(labels.get(COMPLETION_INDEX_LABEL))),
        created_at=parse_time(meta.get("creationTimestamp")) or 0.0,
        node=spec.get("nodeName"),
        phase=status.get("phase", "Pending"),
        reason=status.get("reason"),
        message=(status.get("message") or "")[:_MESSAGE_LIMIT] or None,
        started=bool(ended) or "running" in trainer.get("state", {}),
        deadline=parse_time(meta.get("deletionTimestamp")),
        grace_s=spec.get("terminationGracePeriodSeconds", 30) if deleted_grace is None else deleted_grace,
        disruption=_disruption(raw),
        hang=condition_of(raw, HANG_CONDITION).get("status") == "True",
        exit_code=ended.get("exitCode"),
        exit_reason=ended.get("reason"),
        finished_at=parse_time(ended.get("finishedAt")),
        termination=termination,
        log_tail="" if termination is not None else summarize_log(ended.get("message") or ""),
        other_failure=_other_failure(spec, status),
        others_running=_others_running(status),
        waiting=_waiting(raw, trainer),
        probed=any(c.keys() & _ENDING_PROBES for c in spec.get("containers") or ()),
    )


def _disruption(raw: RawObject) -> str | None:
    """Read the reason of its disruption; not of one that came after the request to delete the pod."""
    meta, condition = raw["metadata"], condition_of(raw, "DisruptionTarget")
    deadline = parse_time(meta.get("deletionTimestamp"))
    disrupted_at = parse_time(condition.get("lastTransitionTime"))
    reason: str | None = condition.get("reason") if condition.get("status") == "True" else None
    if reason not in _DELETING_DISRUPTIONS or deadline is None or disrupted_at is None:
        return reason
    requested_at = deadline - (meta.get("deletionGracePeriodSeconds") or 0)
    return None if disrupted_at > requested_at + _CLOCK_SKEW_S else reason


def _trainer_status(status: Mapping[str, Any]) -> Mapping[str, Any]:
    for container in status.get("containerStatuses") or ():
        if container["name"] == CONTAINER_NAME:
            return dict(container)
    return {}


def _other_failure(spec: Mapping[str, Any], status: Mapping[str, Any]) -> ContainerEnd | None:
    """Find the first other container that failed. Restartable init containers don't end a pod, and are left out."""
    restarted = {c["name"] for c in spec.get("initContainers") or () if c.get("restartPolicy") == "Always"}
    containers = (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ()))
    for container in containers:
        ended = container.get("state", {}).get("terminated") or {}
        name, code = container["name"], ended.get("exitCode", 0)
        if code != 0 and name != CONTAINER_NAME and name not in restarted:
            return ContainerEnd(
                name=name,
                code=code,
                reason=ended.get("reason"),
                finished_at=parse_time(ended.get("finishedAt")),
                log_tail=summarize_log(ended.get("message") or ""),
            )
    return None


def _others_running(status: Mapping[str, Any]) -> tuple[str, ...]:
    containers = status.get("containerStatuses") or ()
    return tuple(
        c["name"] for c in containers if c["name"] != CONTAINER_NAME and "running" in c.get("state", {})
    )


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0


def _termination(message: str | None) -> Termination | None:
    if not message:
        return None
    try:
        return Termination.from_json(message)
    except ContractError:
        # The message is from another program, or the end of the log: use the exit code instead.
        return None


def _waiting(raw: RawObject, trainer: Mapping[str, Any]) -> str | None:
    waiting = trainer.get("state", {}).get("waiting") or {}
    if waiting.get("reason") not in {None, "ContainerCreating", "PodInitializing"}:
        return f"{waiting['reason']}: {waiting.get('message', '')}"[:_MESSAGE_LIMIT]
    scheduled = condition_of(raw, "PodScheduled")
    if scheduled.get("status") == "False":
        return f"{scheduled.get('reason', 'Unscheduled')}: {scheduled.get('message', '')}"[:_MESSAGE_LIMIT]
    return None


def summarize_log(text: str) -> str:
    """Return the last line of the last traceback, or else of the log, then the log's last lines. Empty: no lines."""
    lines = [_RANK.sub("", line).rstrip() for line in text.splitlines()]
    lines = [line for line in lines if line.strip()]
    if not lines:
        return ""
    error = _find_error(lines) or lines[-1].strip()
    rest = [line.strip() for line in lines[-_N_LOG_LINES:] if line.strip() != error]
    return (f"{error} (its log ends with: {' | '.join(rest)})" if rest else error)[:_LOG_LIMIT]


def _find_error(lines: list[str]) -> str | None:
    """Find the line below the last traceback that names its error. Prefer it to the launcher's own last error."""
    errors: list[str] = []
    within = False
    for line in lines:
        # The lines of a traceback are indented; those of an exception group begin with "|" as well.
        belongs_to_traceback = line[0].isspace() or line.startswith("|")
        if line.strip().endswith(_TRACEBACK):
            within = True
        elif within and not belongs_to_traceback:
            errors.append(line.strip())
            within = False
    own = [error for error in errors if _LAUNCHER not in error]
    return next(iter(reversed(own or errors)), None)
