"""Derive condition PendingChanges: which edits the running pods have not read, because they read them at their start.

The job's ConfigMap keeps the settings that the running pods started with while those differ from the job's.
"""

from functools import partial
from typing import Final

from stepkeeper.contract import SETTINGS_FILE_NAME, ContractError, Settings
from stepkeeper_operator.api.v1alpha1.conditions import ConditionType, ConditionUpdate, find_condition
from stepkeeper_operator.api.v1alpha1.reasons import Reason
from stepkeeper_operator.training_jobs.attempts.attempt_pods import find_pods
from stepkeeper_operator.training_jobs.attempts.history import JobHistory
from stepkeeper_operator.training_jobs.build.objects import build_settings, restart_command
from stepkeeper_operator.training_jobs.observed import View

__all__ = ["derive_pending", "find_started_settings"]

_update: Final = partial(ConditionUpdate, ConditionType.PENDING_CHANGES)
_FIELDS: Final = {
    "uri": "spec.checkpoint.uri",
    "interval": "spec.checkpoint.interval",
    "retention": "spec.checkpoint.retention",
    "on_disruption": "spec.checkpoint.onDisruption",
    "total_steps": "spec.totalSteps",
}
"""The fields of the spec that pods read from their settings."""


def derive_pending(view: View, history: JobHistory, *, ends: bool) -> tuple[ConditionUpdate, ...]:
    """Derive the condition. A job that never had a pending edit lacks it; one that is not accepted keeps it.

    While the spec can't be read, no edit becomes pending, but pods that start read the last that was.
    """
    started = None if ends else find_started_settings(view, history)
    if not view.observed.may_start or (started is not None and not view.observed.accepted):
        return ()
    if started is not None:
        text = (
            f"the running pods have not read the present {', '.join(_list_changes(view, started))}: they do at the "
            f"next start. To save and start again now: {restart_command(view.job)}"
        )
        return (_update(Reason.AT_NEXT_START, text, status=True),)
    known = find_condition(view.job.status.conditions, ConditionType.PENDING_CHANGES)
    return () if known is None else (_update(Reason.AS_EXPECTED, status=False),)


def find_started_settings(view: View, history: JobHistory) -> str | None:
    """Return the settings that the running pods have read, if the job's differ; None if there are no such pods."""
    known = view.observed.config_map
    started_pods = [pod for pod in find_pods(history, view.observed).pods if pod.started]
    if known is None or not history.is_running or not started_pods:
        return None
    # The pods of a new attempt have read what is there.
    kept = known.started_settings if history.is_attempt_of(view.job.status) else ""
    if not view.observed.accepted:
        return kept or None  # the settings in the ConfigMap stay, and so does the difference
    started = kept or known.data.get(SETTINGS_FILE_NAME, "")
    return started if _list_changes(view, started) else None


def _list_changes(view: View, started: str) -> list[str]:
    """List the fields of the spec that differ from these settings. What can't be read is no difference."""
    wanted = build_settings(view.job, view.settings)
    try:
        known = Settings.from_json(started)
    except ContractError:
        return []
    return [path for name, path in _FIELDS.items() if getattr(known, name) != getattr(wanted, name)]
