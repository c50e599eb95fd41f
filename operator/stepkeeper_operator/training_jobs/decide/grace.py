"""Derive condition GraceSufficient: whether a save fits into the grace period of the job's pods."""

import math
from functools import partial
from typing import Final

from stepkeeper.contract import END_RESERVE_S, OnDisruption
from stepkeeper_operator.api.v1alpha1.conditions import ConditionType, ConditionUpdate
from stepkeeper_operator.api.v1alpha1.reasons import Reason
from stepkeeper_operator.api.v1alpha1.trainingjob_status import CheckpointStatus
from stepkeeper_operator.training_jobs.attempts.history import JobHistory
from stepkeeper_operator.training_jobs.build.placement import (
    AUTOCHECKPOINT_GRACE_S,
    SPOT_GRACE_S,
    choose_grace_s,
    limit_grace_s,
    on_spot_machines,
)
from stepkeeper_operator.training_jobs.observed import View

__all__ = ["derive_grace"]

_update: Final = partial(ConditionUpdate, ConditionType.GRACE_SUFFICIENT)
_FIELD: Final = "spec.template.spec.terminationGracePeriodSeconds"


def derive_grace(
    view: View, history: JobHistory, checkpoint: CheckpointStatus | None
) -> tuple[ConditionUpdate, ...]:
    """Compare the longest of the newest saves with the pods' effective grace period.

    Return no condition, to keep the present one, while the machines of the next pods are unknown.
    """
    pod_s = _find_pod_grace_s(view, history)
    if pod_s is None:
        return ()
    effective_s = limit_grace_s(pod_s, view.job, view.machines)
    save_s, machines = _find_longest_save_s(checkpoint), view.machines
    have = f"pods have {effective_s} s to shut down"
    if machines is not None:
        have += f" (autocheckpoint is {machines.autocheckpoint_setting} on {machines.name})"
    if view.job.spec.checkpoint.on_disruption is OnDisruption.SKIP:
        text = f"{have}; spec.checkpoint.onDisruption is Skip, so nothing is saved then"
        return (_update(Reason.NOTHING_TO_SAVE, text, status=True),)
    if save_s is None:
        text = f"{have}; the time of a save is unknown until the first commit"
        return (_update(Reason.NO_COMMIT_YET, text, status=None),)
    text = f"a save takes {math.ceil(save_s)} s, and {have}"
    if save_s + END_RESERVE_S <= effective_s:
        return (_update(Reason.SAVE_FITS, text, status=True),)
    advice = _advise(view, pod_s=pod_s, needed_s=math.ceil(save_s + END_RESERVE_S))
    text = f"{text}, of which {END_RESERVE_S} s are reserved for the exit itself: {advice}"
    return (_update(Reason.GRACE_TOO_SHORT, text, status=False),)


def _find_pod_grace_s(view: View, history: JobHistory) -> int | None:
    """Find the grace period in the manifests of the running pods, or else of the next ones."""
    pods = [pod for pod in view.observed.pods if pod.ordinal == history.ordinal and not pod.terminal]
    # A deletion changes the grace period of its pod.
    running_s = [pod.grace_s for pod in pods if pod.deletion_requested_at is None]
    if running_s:
        return min(running_s)
    machines = view.machines
    if view.is_on_queued_resource and (machines is None or not machines.ready):
        return None
    return choose_grace_s(view.job, machines)


def _find_longest_save_s(checkpoint: CheckpointStatus | None) -> float | None:
    if checkpoint is None:
        return None
    commits = checkpoint.recent if checkpoint.latest is None else (*checkpoint.recent, checkpoint.latest)
    times = [commit.duration_millis for commit in commits if commit.duration_millis is not None]
    return max(times) / 1000 if times else None


def _advise(view: View, *, pod_s: int, needed_s: int) -> str:
    """Recommend a change: a longer grace period if the machines allow it, or else faster saves."""
    most_s, why = _find_limit(view)
    if most_s is None or needed_s <= most_s:
        # Without the field, such machines get their limit.
        how = "remove it, or set it" if most_s == AUTOCHECKPOINT_GRACE_S else "set it"
        return f"{_FIELD} is {pod_s}: {how} to at least {needed_s}"
    also = "" if pod_s >= most_s else f"; set {_FIELD} to {most_s}"
    return (
        f"{why}. A save of at most {math.floor(most_s - END_RESERVE_S)} s would fit: save less data, use faster "
        "storage, or save from more hosts. Until then such an end loses the steps since the latest commit: shorten "
        f"spec.checkpoint.interval{also}"
    )


def _find_limit(view: View) -> tuple[int | None, str]:
    """Find the longest grace period in seconds that the machines allow, None without a limit, and the reason."""
    machines = view.machines
    if on_spot_machines(view.job, machines):
        return SPOT_GRACE_S, f"Spot machines give {SPOT_GRACE_S} s regardless of the template"
    if machines is not None and machines.autocheckpoint:
        why = f"the cloud waits {AUTOCHECKPOINT_GRACE_S} s at most before maintenance"
        return AUTOCHECKPOINT_GRACE_S, why
    return None, ""
