"""Derive condition PendingChanges: which edits the running pods have not read, because they read them at their start.

The job's ConfigMap keeps the settings that the running pods started with, after the number of their attempt, while
those differ from the job's.
"""

from dataclasses import replace
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
    "hang": "spec.hang",
}
"""The fields of the spec that pods read from their settings. Of `hang` the limits: the rest takes effect at once."""


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
    """Return the attempt's number and the settings that its pods have read, if the job's differ from these."""
    known = view.observed.config_map
    started_pods = [pod for pod in find_pods(history, view.observed).pods if pod.started]
    if known is None or not history.is_running or not started_pods:
        return None
    # Kept for an earlier attempt, they are out of date: the pods of this one have read what is there.
    prefix = f"{history.attempts[-1].number} "
    kept = known.started_settings if known.started_settings.startswith(prefix) else None
    if not view.observed.accepted:
        return kept  # the settings in the ConfigMap stay, and so does the difference
    started = kept or prefix + known.data.get(SETTINGS_FILE_NAME, "")
    return started if _list_changes(view, started) else None


def _list_changes(view: View, started: str) -> list[str]:
    """List the fields of the spec that differ from these settings. What can't be read is no difference."""
    wanted = build_settings(view.job, view.settings)
    try:
        known = Settings.from_json(started.partition(" ")[2])
    except ContractError:
        return []
    if known.hang is None:  # written by an operator that knows no hangs
        known = replace(known, hang=wanted.hang)
    return [path for name, path in _FIELDS.items() if getattr(known, name) != getattr(wanted, name)]
