"""Decide what follows a hang that the pods report: keep their stacks, and end the attempt if the job asks for that.

The pods find a hang out by themselves, so missing reports are none.
"""

from dataclasses import replace
from typing import Final

from stepkeeper.contract import Hang
from stepkeeper_operator.api.v1alpha1.trainingjob import HangAction
from stepkeeper_operator.api.v1alpha1.trainingjob_status import Attempt
from stepkeeper_operator.facts.pod import Pod
from stepkeeper_operator.facts.raw import render_time
from stepkeeper_operator.training_jobs.attempts.attempt_pods import find_current_report, find_pods
from stepkeeper_operator.training_jobs.attempts.budgets import count_hangs
from stepkeeper_operator.training_jobs.attempts.history import JobHistory
from stepkeeper_operator.training_jobs.build.objects import build_stacks, resolve_hang, restart_command
from stepkeeper_operator.training_jobs.decision import Action, EndHungPods, SaveStacks
from stepkeeper_operator.training_jobs.observed import View
from stepkeeper_operator.training_jobs.policy.plan import Plan

__all__ = ["explain_hang", "find_hang", "follow_hang"]

_KEPT: Final = 3
"""The number of attempts whose stacks are kept."""

_MAX_TEXT: Final = 512


def find_hang(view: View, history: JobHistory) -> Hang | None:
    """Return the hang that the newest report of the running attempt names."""
    last = find_current_report(view.observed, history) if history.is_running else None
    return None if last is None else last.report.hang


def follow_hang(view: View, plan: Plan) -> Plan:
    """Return the plan with what follows the attempt's hang, if there is one."""
    history = plan.history
    hang = find_hang(view, history)
    if hang is None or plan.end is not None:
        return plan
    history, name = _name_stacks(view, history)
    manifest = build_stacks(view.job, name, history.attempts[-1].number, hang)
    actions: tuple[Action, ...] = ()
    if view.observed.saved_stacks != manifest:
        actions += (SaveStacks(manifest=manifest),)
    if pods := _find_pods_to_end(view, history):
        actions += (EndHungPods(pods=pods, message=hang.text[:_MAX_TEXT]),)
    return replace(plan, history=history, actions=(*plan.actions, *actions))


def explain_hang(view: View, history: JobHistory, hang: Hang) -> str:
    """Describe the hang, what the operator does about it, and where the stacks are."""
    name, kubectl = history.attempts[-1].stacks, f"kubectl -n {view.job.metadata.namespace}"
    kept = _why_not_ended(view, history)
    follows = (
        "The attempt is ended, and the next one resumes from the latest commit"
        if kept is None
        else f"No pod is ended: {kept}. To restart from the latest commit: {restart_command(view.job)}"
    )
    since, text = render_time(hang.since_unix_s), hang.text[:_MAX_TEXT]
    stacks = f"{kubectl} get configmap {name} -o jsonpath='{{.data.stacks}}'"
    return f"{hang.kind}, nothing has moved since {since}: {text}. {follows}. All stacks: {stacks}"


def _why_not_ended(view: View, history: JobHistory) -> str | None:
    """Explain why the attempt isn't ended for its hang; None if it is."""
    hang = resolve_hang(view.job, view.settings)
    if hang.action is not HangAction.RESTART:
        return "spec.hang.action is Report"
    limit = hang.max_restarts or 0
    if count_hangs(history.restarts) < limit:
        return None
    return f"spec.hang.maxRestarts allows {limit} restarts after hangs without a new commit"


def _find_pods_to_end(view: View, history: JobHistory) -> tuple[Pod, ...]:
    """Find the pods to end, once: none if the attempt ends already, or if reports no longer show the hang."""
    observed, jobset = view.observed, view.jobset
    last, existing = observed.report, {pod.uid for pod in observed.pods}
    present = [pod for pod in find_pods(history, observed).present if pod.uid in existing]
    is_new = last is not None and last.received_at + view.settings.silence_s > view.now
    runs = jobset is not None and not (jobset.deleting or jobset.suspend or view.job.spec.suspend)
    if not (is_new and runs and observed.accepted) or _why_not_ended(view, history) is not None:
        return ()
    if any(pod.deletion_requested_at is not None and pod.hang is None for pod in present):
        return ()
    return tuple(pod for pod in present if not pod.terminal and pod.deletion_requested_at is None)


def _name_stacks(view: View, history: JobHistory) -> tuple[JobHistory, str]:
    """Name the ConfigMap for the stacks of the last attempt. It may be that of the oldest attempt that has one."""
    attempt = history.attempts[-1]
    if attempt.stacks is not None:
        return history, attempt.stacks
    # The uid, since an object of this name may be left of a deleted job of the same name.
    prefix = f"{view.job.metadata.name}-stacks-{view.job.metadata.uid[:8]}"
    newest = [each.stacks for each in history.attempts if each.stacks is not None][-(_KEPT - 1) :]
    name = next(name for name in (f"{prefix}-{i}" for i in range(_KEPT)) if name not in newest)
    earlier = (_with_stacks(each, None) if each.stacks == name else each for each in history.attempts[:-1])
    return replace(history, attempts=(*earlier, _with_stacks(attempt, name))), name


def _with_stacks(attempt: Attempt, name: str | None) -> Attempt:
    return attempt.model_copy(update={"stacks": name})
